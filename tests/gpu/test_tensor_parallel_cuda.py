"""Families divided among two GPUs, compiled, one process a GPU, beside transformers in float32:

python -m pytest -m gpu tests/gpu/test_all_reduce_cuda.py tests/gpu/test_tensor_parallel_cuda.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import test_parity as parity  # noqa: E402

from graphllm.runtime.multiproc import Ranks  # noqa: E402
from graphllm.runtime.staging import StepInput  # noqa: E402

N_TOKENS, LENGTHS = 8, (1, 7, 90)
RUNS = [("llama_biases", False), ("gemma2", False), ("qwen2_moe", False), ("gpt_oss", False), ("gpt_oss", True)]


class Processes:
    """`Ranks` as `Driver` runs an executor."""

    def __init__(self, place: Path, folder: Path) -> None:
        self.layout = SimpleNamespace(num_blocks=64, groups=_groups(place))
        self._ranks = Ranks(place, folder, 2, 64)
        self.close = self._ranks.close

    def run(self, step: StepInput) -> Any:
        found = self._ranks.run(step)
        return SimpleNamespace(tokens=found["tokens"], logits=torch.from_numpy(found["logits"].copy()))


def _groups(place: Path) -> list[Any]:
    import json

    return list(json.loads((place / "program.json").read_text())["blocks"]["groups"])


@pytest.mark.parametrize(("name", "apart"), RUNS)
@torch.no_grad()
def test_two_gpus_give_what_transformers_does(name: str, apart: bool, tmp_path: Path) -> None:
    arch = next(a for a in parity.ARCHS if a.name == name)
    model = parity._build(arch)
    model.save_pretrained(tmp_path)
    opened: list[Processes] = []

    def ranks_of(place: Path, checkpoint: Any) -> Processes:
        opened.append(Processes(place, tmp_path))
        return opened[0]

    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": apart}
    runner = parity.driver.Driver(
        tmp_path, "inductor", tmp_path / "artifact", target="cuda", settings=settings, opened=ranks_of
    )
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(parity.V, (n,), generator=draw).tolist() for n in LENGTHS]
    try:
        for _ in range(2):  # the second time every graph is replayed
            logits, tokens = runner.generate(prompts, N_TOKENS)
            for i, prompt in enumerate(prompts):
                expected = parity._forced(model, prompt, tokens[i])
                torch.testing.assert_close(logits[i], expected[0], atol=2e-3, rtol=0)
                best = expected.topk(2).values
                clear = best[:, 0] - best[:, 1] > 4e-3
                assert (torch.tensor(tokens[i]) == expected.argmax(-1))[clear].all()
    finally:
        opened[0].close()
