"""Weights in the host's memory on a GPU: they come a group ahead, inside captured graphs and outside of them, and texts
are those of an engine that has all of them on the GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphllm import LLM, SamplingParams
from graphllm.runtime.commands.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SETTINGS: dict[str, Any] = {
    "target": "cuda", "dtype": "bfloat16", "tune": False, "max_num_seqs": 8, "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=2)
Found = list[tuple[list[int], list[float]]]  # of each prompt: tokens and log-probabilities


@contextmanager
def engine(name: str, gib: float) -> Iterator[LLM]:
    with LLM(name, cpu_offload_gb=gib, **SETTINGS) as llm:
        yield llm


def answers(llm: LLM, count: int) -> Found:
    """Of prompts of different lengths."""
    draw = random.Random(count)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, 200) for _ in range(draw.randrange(1, 90))]} for _ in range(count)
    ]
    found = []
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):  # type: ignore[arg-type]
        answer = output.outputs[0]
        assert answer.logprobs is not None
        found.append((
            list(answer.token_ids),
            [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)],
        ))  # fmt: skip
    return found


def where(worker: Worker) -> tuple[int, int, bool]:
    """Bytes of layers on the GPU and on the host, and whether those on the host are registered."""
    layers = [weight for name, weight in worker.weights.items() if name.startswith("layers.")]
    host = [weight for weight in layers if weight.device.type == "cpu"]
    total = sum(weight.nbytes for weight in layers)
    on_host = sum(weight.nbytes for weight in host)
    return total - on_host, on_host, all(weight.is_pinned() for weight in host)


def scale(worker: Worker) -> None:
    """Change all layers."""
    for name, weight in worker.weights.items():
        if name.startswith("layers.") and weight.is_floating_point():
            weight.mul_(1.0625)


@pytest.mark.parametrize("name", ["embedded", "embedded-hybrid"])
def test_answers_are_the_same(name: str) -> None:
    with engine(name, 0) as llm:
        expected = {count: answers(llm, count) for count in (1, 3, 8)}
        ((on_gpu, on_host, _),) = llm.collective_rpc(where)
        assert on_host == 0
    whole = on_gpu / 2**30
    assert len({tuple(tokens) for tokens, _ in expected[8]}) > 4  # the prompts are not all alike to the model
    for gib in (0.6 * whole, 2 * whole):
        with engine(name, gib) as llm:
            for _ in range(2):
                assert {count: answers(llm, count) for count in (1, 3, 8)} == expected
            ((_, on_host, registered),) = llm.collective_rpc(where)
            assert registered
            assert on_host >= min(gib * 2**30, 0.9 * on_gpu)


def test_what_is_written_is_used() -> None:
    with engine("embedded", 0) as llm:
        before = answers(llm, 3)
        llm.collective_rpc(scale)
        expected = answers(llm, 3)
        assert expected != before
    with engine("embedded", 4) as llm:
        assert answers(llm, 3) == before
        llm.collective_rpc(scale)
        assert answers(llm, 3) == expected
