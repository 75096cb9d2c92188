"""Experts that move between two GPUs of one host, whose steps are captured graphs: transformers' log-probabilities
before and after, and while every step moves one. One command, in two minutes:

    python -m pytest -m gpu tests/gpu/test_moving_experts_cuda.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.several_gpus import OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
from graphllm import LLM  # noqa: E402
from tests.engine.experts import test_moving_experts as here  # noqa: E402
from tests.engine.experts.test_moving_experts import checkpoint, model, one_move_a_step  # noqa: E402, F401

CLOSE = {"tolerance": 5e-3, "ties": 1e-2}  # products of float32 on GPUs may round to 19 bits
SETTINGS: dict[str, Any] = {
    **here.OPTIONS, **OPTIONS, "backend": "inductor", "tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 26,
}  # fmt: skip


@pytest.mark.usefixtures("one_move_a_step")
def test_by_load_and_anywhere(checkpoint: Path, model: Any) -> None:  # noqa: F811
    settings = {**SETTINGS, "eplb_config": {"num_redundant_experts": 2, "step_interval": 12}}
    with LLM(checkpoint, **settings) as llm:
        counted = sum(here.check(model, llm, **CLOSE) for _ in range(4))
        assert here.balancer_of(llm).moved > 4
        stats = llm.llm_engine.core.stats()
        assert [sum(row) for row in stats.expert_tokens] == counted.sum(1).tolist()
    with LLM(checkpoint, **settings | {"eplb_config": {"num_redundant_experts": 2}}) as llm:
        for seed in range(3):
            here.check(model, llm, **CLOSE)
            here.scatter(llm, seed)
        here.check(model, llm, **CLOSE)
