"""Models of transformers' own code with what else an engine does: quantized checkpoints, quantization while loading,
LoRA adapters, ranks, drafts of n-grams, deterministic mode. Beside transformers and PEFT with the same numbers."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from graphllm import LLM, LoRARequest, SamplingParams
from graphllm.config import Bucket
from graphllm.loading.checkpoint.source import open_source
from graphllm.weights.plan.plan import WeightPlan
from tests.artifacts import artifact_of
from tests.engine.adapters.checked import check_logprobs
from tests.engine.harness import GREEDY, Result, finish, open_core, request
from tests.models import driver
from tests.models.causal_types import V, difference, random_model, tiny
from tests.models.sharded import Sharded
from tests.tiers import COMPILED, ON_GPU, thorough
from tests.weights.quantized import FORMATS, Format

# Norms behind; one norm for both branches, biases, a part of heads rotated; keys of all heads in one matrix by turns.
KINDS = ("olmo2", "stablelm", "gpt_neox")
OTHERS = ("cohere2", "phi", "starcoder2")
STORED = ("awq", "gptq 4 bits", "fp8 blocks", "float8 channels")
COUNT, SEQS = 12, 3
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 2, SEQS), Bucket("decode", 2, SEQS, 4), Bucket("mixed", 2, 64))
# Bits, the largest integer of a group, and the numbers in it: `graphllm.weights.formats.integers`.
GRIDS = {"int8": (8, 127, 64), "int4": (4, -8, 32)}
COMPILED_KINDS = (
    "apertus", "arcee", "biogpt", "cohere", "cohere2", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "flex_olmo", "gemma4_text", "glm", "glm4", "gpt_bigcode", "gpt_neox", "helium", "hunyuan_v1_dense", "nemotron",
    "olmo", "olmo2", "olmo3", "persimmon", "phi", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "xglm",
)  # fmt: skip


def _pairs(options: tuple[str, ...]) -> list[Any]:
    """Of a kind and an option: the first of both in the first tier, and other kinds with one option in slow tests."""
    pairs = [(kind, option) for kind in KINDS for option in options]
    slow = [pytest.param(kind, options[0], marks=pytest.mark.slow) for kind in OTHERS]
    return [pairs[0], *(thorough(*pair) for pair in pairs[1:]), *slow]


def _model(kind: str, **changes: Any) -> transformers.PreTrainedModel:
    return random_model(tiny(kind, intermediate_size=128, **changes))


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Those of the layers."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers." in n]
    assert len(found) >= 12
    return found


@torch.no_grad()
def _write(folder: Path, model: transformers.PreTrainedModel, made: Format) -> None:
    """A checkpoint with the layers' matrices in a format; the model gets the numbers that they stand for."""
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, module in _linears(model):
        stored, numbers = made.encode(tensors.pop(f"{name}.weight").float())
        tensors |= {f"{name}.{n}": t.clone().contiguous() for n, t in stored.items()}
        module.weight.copy_(numbers)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"architectures": [type(model).__name__], "quantization_config": made.config}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | settings))


@torch.no_grad()
def _round(model: nn.Module, quantization: str) -> None:
    """Give a model weights that rounding keeps."""
    draw = torch.Generator().manual_seed(1)
    bits, first, group = GRIDS[quantization]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for part in module.weight.split(group, 1):
                numbers = torch.randint(1 - abs(first), abs(first), part.shape, generator=draw).float()
                numbers[:, 0] = first
                scales = 2.0 ** torch.randint(-2, 0, (len(part), 1), generator=draw)
                part.copy_(numbers * scales / 2 ** (bits - 1))


def _encodings(place: Path) -> set[str]:
    """The parts in which entries of the weight plan are kept."""
    return {entry.name.rpartition(".")[2] for entry in WeightPlan.from_json((place / "weights.json").read_text())}


@pytest.mark.parametrize(("kind", "name"), _pairs(STORED))
def test_quantized_checkpoints(kind: str, name: str, tmp_path: Path) -> None:
    model = _model(kind)
    _write(tmp_path, model, FORMATS[name])
    runner = driver.Driver(tmp_path, "eager")
    assert difference(model, runner, V) < 2e-4
    assert "values" in _encodings(runner.place), "no product reads the stored integers"


@pytest.mark.parametrize(("kind", "quantization"), _pairs(("int8", "int4")))
def test_quantization_while_loading(kind: str, quantization: str, tmp_path: Path) -> None:
    model = _model(kind)
    _round(model, quantization)
    model.save_pretrained(tmp_path)
    runner = driver.Driver(tmp_path, "eager", settings={"quantization": quantization})
    assert difference(model, runner, V) < 2e-4
    assert "values" in _encodings(runner.place)


@pytest.mark.parametrize(("kind", "name"), _pairs(("awq", "float8 channels")))
def test_ranks_of_quantized_checkpoints(kind: str, name: str, tmp_path: Path) -> None:
    model = _model(kind)
    _write(tmp_path, model, FORMATS[name])
    opened: list[Sharded] = []

    def ranks_of(place: Path, checkpoint: Any) -> Sharded:
        opened.append(Sharded(place, checkpoint, 2, num_blocks=64))
        return opened[0]

    runner = driver.Driver(tmp_path, "eager", settings={"tensor_parallel_size": 2}, opened=ranks_of)
    with opened[0]:
        assert difference(model, runner, V) < 2e-4
    assert "values" in _encodings(runner.place)


@pytest.mark.parametrize("kind", [KINDS[0], *map(thorough, KINDS[1:]), *map(thorough, OTHERS)])
def test_adapters(kind: str, tmp_path: Path) -> None:
    """Of all linear layers and of some, with and without in one batch."""
    base = _model(kind)
    base.save_pretrained(tmp_path / "model")
    names = sorted({n.rpartition(".")[2] for n, _ in _linears(base)})
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=names), "all").eval()
    model.add_adapter("some", peft.LoraConfig(r=8, lora_alpha=4, use_rslora=True, target_modules=names[::2]))
    for parameter, values in model.named_parameters():
        if "lora_" in parameter:
            nn.init.normal_(values, std=0.2)
    model.save_pretrained(tmp_path / "adapters")

    def logprobs(tokens: Any, adapter: str | None) -> torch.Tensor:
        model.set_adapter(adapter or "all")
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            if adapter is None:
                with model.disable_adapter():
                    logits = model(ids).logits[0]
            else:
                logits = model(ids).logits[0]
        return torch.log_softmax(logits.double(), -1)

    requests = {n: LoRARequest(n, i + 1, str(tmp_path / "adapters" / n)) for i, n in enumerate(("all", "some"))}
    mixed = [None, "all", "some"] * 2
    draw = random.Random(0)
    prompts: list[Any] = [{"prompt_token_ids": [draw.randrange(3, V) for _ in range(n)]} for n in (1, 5, 19, 45, 7, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=20, prompt_logprobs=0, ignore_eos=True)
    with LLM(
        tmp_path / "model", dtype="float32", backend="eager", max_model_len=96, max_num_seqs=4, block_size=8,
        max_num_batched_tokens=32, skip_tokenizer_init=True, enable_lora=True, max_loras=2, max_lora_rank=8,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, lora_request=[a and requests[a] for a in mixed])
    check_logprobs(logprobs, outputs, mixed, 2e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", [KINDS[0], *map(thorough, KINDS[1:]), *map(thorough, OTHERS)])
def test_drafts_of_ngrams_and_prefixes(kind: str, tmp_path: Path) -> None:
    """Texts that repeat are drafted from themselves; what a prompt begins with is found again."""
    model = _model(kind, sliding_window=128)  # of shorter windows, long texts leave no block of the prompt
    model.save_pretrained(tmp_path)
    place = artifact_of(
        open_source(tmp_path), target="cpu", backend="eager", dtype="float32", max_model_len=128, max_num_seqs=SEQS,
        max_num_batched_tokens=64, block_size=16, num_speculative_tokens=3, prompt_lookup_max=2, tune=False,
        buckets=BUCKETS,
    )  # fmt: skip
    core = open_core(tmp_path, place, 160)
    draw = torch.Generator().manual_seed(3)
    prompts = [(torch.randint(3, V, (n,), generator=draw).tolist() * 30)[:60] for n in (2, 5, 9, 60)]
    for again in (False, True):
        found = finish(core, [request(str(i), p, GREEDY, limit=COUNT * 3) for i, p in enumerate(prompts)])
        for i, prompt in enumerate(prompts):
            drawn = found[str(i)].tokens
            expected = model(torch.tensor([prompt + drawn[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
            assert drawn == expected.argmax(-1).tolist()
            assert (found[str(i)].cached >= 48) == again
    assert sum(core.stats().accepted_tokens) > 0
    core.close()


def _told(result: Result) -> tuple[Any, ...]:
    return result.tokens, result.logprobs, result.prompt_logprobs


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_deterministic(kind: str, tmp_path: Path) -> None:
    """Numbers of a request are bitwise what it gets alone."""
    _model(kind).save_pretrained(tmp_path)
    place = artifact_of(
        open_source(tmp_path), target="cpu", dtype="bfloat16", max_model_len=128, max_num_seqs=SEQS,
        max_num_batched_tokens=64, block_size=16, deterministic=True, tune=False,
    )  # fmt: skip
    draw = random.Random(3)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    wanted = [request(str(i), [draw.randrange(3, V) for _ in range(n)], params) for i, n in enumerate((1, 9, 40, 70))]
    alone = open_core(tmp_path, place, 60, enable_prefix_caching=False)
    expected = {r.id: _told(finish(alone, [r])[r.id]) for r in wanted}
    alone.close()
    for chunk in (0, 7):
        core = open_core(tmp_path, place, 60, long_prefill_token_threshold=chunk)
        for _ in range(2):
            assert {id: _told(r) for id, r in finish(core, wanted).items()} == expected
        core.close()


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(thorough("prebuilt", kind) for kind in COMPILED_KINDS),
        *(pytest.param("inductor", kind, marks=COMPILED) for kind in COMPILED_KINDS),
    ],
)
def test_compiled(backend: Any, kind: str, tmp_path: Path) -> None:
    config = tiny(kind)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    runner = driver.Driver(tmp_path, backend, target="cuda" if ON_GPU and backend == "inductor" else "cpu")
    assert difference(model, runner, config.vocab_size) < 2e-4


def _ops(place: Path) -> dict[str, int]:
    """Of the pieces that an artifact's steps run: how often each op with its result, without names of weights."""
    found: Counter[str] = Counter()
    for piece in (place / "graph").glob("piece.*.txt"):
        title, *lines = piece.read_text().splitlines()
        often = int(title.rpartition(", runs ")[2].split()[0])
        for line in lines:
            if line.startswith("%"):
                _, _, call = line.partition(": ")
                found[re.sub(r"%\w+", "%", call)] += often
    assert found
    return dict(found)


@pytest.mark.parametrize("kind", ["llama", thorough("qwen3")])
def test_steps_are_those_of_own_files(kind: str, tmp_path: Path) -> None:
    """Where graphllm has a file, too, a step of transformers' code has the same calls of ops."""
    _model(kind).save_pretrained(tmp_path)
    made = [
        artifact_of(
            open_source(tmp_path, model_impl=impl), target="cpu", backend="eager", dtype="bfloat16", tune=False,
            max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64,
        )
        for impl in ("graphllm", "transformers")
    ]  # fmt: skip
    assert made[0] != made[1]
    assert _ops(made[0]) == _ops(made[1])
