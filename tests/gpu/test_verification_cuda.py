"""Verification of drafts on the GPU: compiled programs of several tokens a sequence, captured and replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from test_verification import (  # noqa: E402, F401
    llama,
    llama_place,
    looking,
    test_drafts_change_nothing_but_the_number_of_steps,
    test_every_kind_of_request_is_verified,
    test_lossy_acceptance,
    test_sampled_tokens_are_the_same_with_drafts,
)

from graphllm.config import EngineArgs  # noqa: E402


@pytest.fixture(scope="module")
def engine_args() -> EngineArgs:
    return EngineArgs(
        target="cuda", dtype="float32", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=32, block_size=16,
        num_speculative_tokens=3, tune=False,
    )  # fmt: skip
