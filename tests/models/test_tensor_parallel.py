"""Every family divided among ranks, beside transformers: prefill logits and greedy tokens, float32, ragged.

The ranks are threads of this process (sharded.py), each with an executor and its share of the weights; processes that
join a group are in tests/runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from graphllm.program.artifact import Artifact
from tests.models import test_parity as parity
from tests.models.sharded import Sharded

N_TOKENS, LENGTHS = 8, (1, 7, 90)
# What of the tiny models cannot be divided by four: three query heads for each of two heads of keys would be cut.
HERE = {"llama_biases", "gemma2", "olmoe", "gpt_oss", "mamba2", "deepseek_v2_lite", "bloom_odd"}
APART = {"mixtral": (2, 4), "qwen2_moe_some_dense": (2,), "qwen3_moe": (2,), "gpt_oss": (2,), "jamba": (2,),
         "nemotron_h_moe": (2,), "deepseek_v3": (2,)}  # fmt: skip
RUNS = [(arch, ranks, False) for arch in parity.ARCHS for ranks in (2, 4)]
RUNS += [(arch, ranks, True) for arch in parity.ARCHS for ranks in APART.get(arch.name, ())]


def _marks(arch: parity.Arch, ranks: int, apart: bool) -> list[pytest.MarkDecorator]:
    here = arch.name in HERE and ranks == 4 - 2 * (arch.name == "gpt_oss")
    return [] if here else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("arch", "ranks", "apart"),
    [pytest.param(a, r, e, id=f"{a.name}-{r}{'-apart' if e else ''}", marks=_marks(a, r, e)) for a, r, e in RUNS],
)
@torch.no_grad()
def test_ranks_give_what_transformers_does(arch: parity.Arch, ranks: int, apart: bool, tmp_path: Path) -> None:
    model = parity._build(arch, arch.config)
    model.save_pretrained(tmp_path)
    compare(arch, model, tmp_path, ranks, {"enable_expert_parallel": True} if apart else {})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(a, id=a.name, marks=[] if a.name == "gpt2" else [pytest.mark.slow])
        for a in parity.ARCHS
        if a.name in ("qwen2_moe", "gemma2", "gpt2", "olmoe", "gpt_oss", "granite_hybrid_dense")
    ],
)
@torch.no_grad()
def test_compiled(arch: parity.Arch, tmp_path: Path) -> None:
    """What is between the collectives by Inductor and our kernels."""
    model = parity._build(arch, arch.config)
    model.save_pretrained(tmp_path)
    compare(arch, model, tmp_path, 2, {}, "inductor")


def compare(
    arch: parity.Arch,
    model: Any,
    folder: Path,
    ranks: int,
    settings: dict[str, Any],
    backend: Literal["eager", "inductor"] = "eager",
) -> None:
    opened: list[Sharded] = []

    def ranks_of(place: Path, checkpoint: Any) -> Sharded:
        opened.append(Sharded(place, checkpoint, ranks, num_blocks=64))
        return opened[0]

    settings = {"tensor_parallel_size": ranks, **settings}
    runner = parity.driver.Driver(folder, backend, settings=settings, opened=ranks_of)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(parity.V, (n,), generator=draw).tolist() for n in LENGTHS]
    memory = Artifact.open(runner.place).memory.weights
    for own in opened[0].weights:
        assert memory == sum(t.nbytes for t in {t.data_ptr(): t for t in own.values()}.values())
    with opened[0]:
        logits, tokens = runner.generate(prompts, N_TOKENS)
    for i, prompt in enumerate(prompts):
        expected = parity._forced(model, prompt, tokens[i])
        torch.testing.assert_close(logits[i], expected[0], atol=1e-4, rtol=0)
        assert tokens[i] == expected.argmax(-1).tolist()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "rounded", "apart"),
    [
        ("qwen3_moe", "int4", True),
        *(pytest.param(n, q, False, marks=pytest.mark.slow) for n in ("llama", "qwen3_moe") for q in ("int4", "int8")),
    ],
)
@torch.no_grad()
def test_weights_that_are_rounded_by_groups(name: str, rounded: str, apart: bool, tmp_path: Path) -> None:
    """The groups of each rank are those of one process: so are the logits."""
    found = next(a for a in parity.ARCHS if a.name == name)
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    parity._build(found, found.config | wide).save_pretrained(tmp_path)
    opened: list[Sharded] = []

    def ranks_of(place: Path, checkpoint: Any) -> Sharded:
        opened.append(Sharded(place, checkpoint, 2, num_blocks=64))
        return opened[0]

    settings = {"quantization": rounded}
    one = parity.driver.Driver(tmp_path, "eager", settings=settings)
    settings = {"quantization": rounded, "tensor_parallel_size": 2, "enable_expert_parallel": apart}
    two = parity.driver.Driver(tmp_path, "eager", settings=settings, opened=ranks_of)
    shown = [Artifact.open(driver.place).manifest for driver in (one, two)]
    assert shown[1].memory.weights < 0.55 * shown[0].memory.weights
    prompts = [torch.randint(parity.V, (n,)).tolist() for n in LENGTHS]
    expected, text = one.generate(prompts, N_TOKENS)
    with opened[0]:
        logits, tokens = two.generate(prompts, N_TOKENS)
    for row, same in zip(logits, expected, strict=True):
        torch.testing.assert_close(row, same, atol=1e-4, rtol=0)
    assert tokens == text
