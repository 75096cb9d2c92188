"""Engines of several ranks on GPUs of one host: collectives in captured graphs, text and log-probabilities as of one
GPU and of transformers, and ranks that die. One command runs them:

    python -m pytest -m gpu tests/gpu/test_ranks_cuda.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from test_ranks import (  # noqa: E402, F401
    GREEDY,
    PROMPTS,
    TestTwoRanks,
    one,
    test_a_rank_that_dies,
    test_a_rank_that_samples_something_else,
    test_a_rank_that_stops,
    test_drafts_by_lookup,
    two,
)

from graphllm import LLM, SamplingParams  # noqa: E402


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """Compiled for these GPUs, with the smallest blocks that their attention kernels take."""
    return {
        "target": "cuda", "dtype": "float32", "seed": 3, "max_model_len": 96, "max_num_seqs": 4,
        "max_num_batched_tokens": 32, "block_size": 16, "tune": False, "kv_cache_memory_bytes": 1 << 28,
    }  # fmt: skip


@pytest.fixture(scope="module")
def tolerance() -> float:
    return 2e-3  # products of float32 on GPUs may round to 19 bits


def test_long_batches_replay_the_same_graphs(checkpoint: Path, options: dict[str, Any]) -> None:
    """Each padded size is captured at its first step on every rank, then replayed; text stays that of one GPU."""
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [p for p in PROMPTS for _ in range(4)]
    with LLM(checkpoint, **options) as alone:
        expected = [o.outputs[0].token_ids for o in alone.generate(prompts, greedy)]
    with LLM(checkpoint, tensor_parallel_size=2, **options) as llm:
        for _ in range(2):
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)] == expected


def test_stages(checkpoint: Path, options: dict[str, Any]) -> None:
    """A layer on each GPU; what goes from one to the other is in their graphs."""
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(checkpoint, **options) as alone:
        expected = [o.outputs[0].token_ids for o in alone.generate(PROMPTS, greedy)]
    with LLM(checkpoint, pipeline_parallel_size=2, **options) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy)] == expected
