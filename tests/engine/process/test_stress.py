"""Hundreds of random requests over few pages: preemption and eviction all the time, yet each gets what it gets
alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.requests.request import EngineRequest
from tests.artifacts import artifact_of
from tests.engine.harness import Result, finish, open_core, request

V, CONTEXT, PAGE = 300, 2304, 16


def _make(folder: Path) -> None:
    """A tiny Llama with a long context in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, tie_word_embeddings=False,
        )
    ).save_pretrained(folder)  # fmt: skip


@pytest.fixture(scope="module")
def model(shared: Any) -> tuple[Path, Path]:
    """The checkpoint and its artifact."""
    sizes = {"max_model_len": CONTEXT, "max_num_seqs": 24, "max_num_batched_tokens": 512, "block_size": PAGE}
    folder = shared("stress", _make)
    return folder, artifact_of(folder, dtype="float32", **sizes)


@pytest.fixture(scope="module")
def roomy(model: tuple[Path, Path]) -> Iterator[EngineCore]:
    core = open_core(*model, pages=2 * CONTEXT // PAGE, enable_prefix_caching=False)
    yield core
    core.close()


def _sampling(rng: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.5},
    ]
    return rng.choice(kinds)


def _requests(count: int, seed: int) -> list[EngineRequest]:
    """Lengths 1-2,000 in, 1-200 out; n of 1-4 as siblings; a third of the prompts begin like others."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(V) for _ in range(rng.choice([100, 600]))] for _ in range(4)]
    made: list[EngineRequest] = []
    while len(made) < count:
        length = int(2000 ** rng.random())
        prompt = [rng.randrange(V) for _ in range(length)]
        if rng.random() < 0.33:
            prompt = (rng.choice(beginnings) + prompt)[:2000]
        params = SamplingParams(
            max_tokens=rng.randint(1, 200), ignore_eos=True, seed=rng.randrange(1000), **_sampling(rng)
        )
        n = rng.choice([1, 1, 1, 2, 3, 4]) if params.temperature else 1
        name = f"{len(made)}"
        for i in range(n):
            fork = f"{name}.0" if i else ""
            made.append(request(f"{name}.{i}", prompt, params, seed=(params.seed or 0) + i, fork_of=fork))
    return made


def _run(model: tuple[Path, Path], roomy: EngineCore, count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    wanted = _requests(count, seed)
    core = open_core(*model, pages=1 + 150)
    victims = {rng.randrange(4 * count): r.id for r in rng.sample(wanted, count // 10)}
    try:
        found = finish(core, wanted, lambda step: core.abort([victims[step]]) if step in victims else None)
        stats = core.stats()
    finally:
        core.close()
    checked = 0
    for r in wanted:
        result = found[r.id]
        assert result.finish_reason in ("length", "abort"), result.error
        if result.finish_reason == "length":
            assert len(result.tokens) == r.limit
        if r.params.temperature == 0:
            alone = finish(roomy, [r])[r.id]
            _same(result, alone)
            checked += 1
    aborted = sum(r.finish_reason == "abort" for r in found.values())
    return {"preemptions": stats.preemptions, "prefix hits": stats.prefix_hits, "greedy checked": checked,
            "aborted": aborted}  # fmt: skip


def _same(result: Result, alone: Result) -> None:
    assert result.tokens == alone.tokens[: len(result.tokens)]
    for ours, theirs in zip(result.logprobs, alone.logprobs, strict=False):
        assert (ours.token, ours.top_ids[0]) == (theirs.token, theirs.top_ids[0])
        assert abs(ours.logprob - theirs.logprob) < 1e-3


@pytest.mark.thorough
def test_random_requests(model: tuple[Path, Path], roomy: EngineCore) -> None:
    seen = _run(model, roomy, count=60, seed=0)
    assert seen["preemptions"] > 10
    assert seen["prefix hits"] > 100
    assert seen["greedy checked"] > 10


@pytest.mark.slow
def test_five_hundred_random_requests(
    model: tuple[Path, Path], roomy: EngineCore, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = _run(model, roomy, count=500, seed=1)
    with capsys.disabled():
        print(f"\n500 random requests: {seen}")
    assert seen["preemptions"] > 150
    assert seen["prefix hits"] > 1000
