"""Engines of several ranks, stages and cores on two GPUs of one host: collectives in captured graphs, text and
log-probabilities as of one GPU and of transformers, and a rank that dies. `test_tensor_parallel_cuda` has the command.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.several_gpus import OPTIONS, Compiled, check_dying

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
from graphllm import LLM, SamplingParams  # noqa: E402
from tests.engine.ranks import test_ranks  # noqa: E402
from tests.engine.ranks.test_ranks import PROMPTS  # noqa: E402

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def cached(compiled: Compiled) -> Iterator[None]:
    """Engines find what was compiled for one and for two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHLLM_CACHE", str(compiled.cache))
        yield


@pytest.fixture(autouse=True)
def in_the_cache(cached: None, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHLLM_CACHE", str(compiled.cache))


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {**OPTIONS, "seed": 3, "kv_cache_memory_bytes": 1 << 28}


@pytest.fixture(scope="module")
def tolerance() -> float:
    return 2e-3  # products of float32 on GPUs may round to 19 bits


@pytest.fixture(scope="module")
def one(cached: None, checkpoint: Path, options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(checkpoint, **options) as llm:
        yield llm


@pytest.fixture(scope="class")
def two(cached: None, checkpoint: Path, options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(checkpoint, tensor_parallel_size=2, **options) as llm:
        yield llm


def _tokens(llm: LLM, prompts: list[str]) -> list[Any]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, LONG)]


class TestTwoRanks(test_ranks.TestTwoRanks):
    """What ranks on a CPU do, and long batches."""

    def test_long_batches_replay_the_same_graphs(self, one: LLM, two: LLM) -> None:
        """Each padded size is captured at its first step on every rank, then replayed; text stays that of one GPU."""
        prompts = [p for p in PROMPTS for _ in range(4)]
        expected = _tokens(one, prompts)
        for _ in range(2):
            assert _tokens(two, prompts) == expected


def test_stages(one: LLM, checkpoint: Path, options: dict[str, Any]) -> None:
    """A layer on each GPU; `test_stages_cuda` has more of this."""
    with LLM(checkpoint, pipeline_parallel_size=2, **options) as llm:
        assert _tokens(llm, PROMPTS) == _tokens(one, PROMPTS)


def test_a_rank_that_dies(checkpoint: Path, options: dict[str, Any]) -> None:
    check_dying(checkpoint, options | {"tensor_parallel_size": 2})


def test_an_engine_that_nobody_closes(checkpoint: Path, options: dict[str, Any]) -> None:
    """The process ends all the same, and by itself."""
    script = f"""
from graphllm import LLM, SamplingParams
llm = LLM({str(checkpoint)!r}, tensor_parallel_size=2, **{options!r})
print(len(llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=90, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["4"]), done.stdout + done.stderr[:6000]


def test_cores(one: LLM, checkpoint: Path, options: dict[str, Any]) -> None:
    """The whole model on each GPU; half of the requests go to each."""
    with LLM(checkpoint, data_parallel_size=2, **options) as llm:
        assert _tokens(llm, PROMPTS) == _tokens(one, PROMPTS)
