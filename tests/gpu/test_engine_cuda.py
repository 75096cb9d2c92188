"""The engine core on the GPU: captured graphs, tokens fed on the device, sampling kernels, copies of blocks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from test_core import (  # noqa: E402, F401
    model,
    opened,
    test_aborts_at_any_time,
    test_forks_share_their_prompt,
    test_greedy_is_what_transformers_gives,
    test_logits_processors,
    test_logprobs,
    test_penalties_and_masks,
    test_preempted_requests_lose_nothing,
    test_seeds_do_not_depend_on_neighbours,
    test_stop_tokens,
    test_the_next_step_starts_before_the_tokens_of_this_one_are_known,
)


def _compile(checkpoint: Path, folder: Path) -> None:
    from graphllm.compile.pipeline import compile_model
    from graphllm.config import EngineArgs
    from graphllm.entrypoints.resolve import compile_config
    from graphllm.entrypoints.source import open_source

    source = open_source(checkpoint)
    wanted = EngineArgs(
        target="cuda", dtype="float32", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=32, block_size=16
    )
    compile_model(source.config, source.tensors, compile_config(source.config, wanted), folder)


@pytest.fixture
def block_size() -> int:
    """The least that the GPU's attention kernels take."""
    return 16


@pytest.fixture(scope="session")
def eager_artifact(shared: Any, checkpoint: Path) -> Path:
    """In the place of the CPU's: compiled for this GPU."""
    return shared("cuda", lambda folder: _compile(checkpoint, folder))
