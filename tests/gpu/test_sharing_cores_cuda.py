"""Engine cores that share experts, on two GPUs of one host, whose steps are captured graphs: transformers'
log-probabilities, also where one core has no requests. One command, in two minutes:

    python -m pytest -m gpu tests/gpu/test_sharing_cores_cuda.py
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
from tests.engine.experts.test_moving_experts import checkpoint, model  # noqa: E402, F401

CLOSE = {"tolerance": 5e-3, "ties": 1e-2}  # products of float32 on GPUs may round to 19 bits
SETTINGS: dict[str, Any] = {
    **here.OPTIONS, **OPTIONS, "backend": "inductor", "enable_eplb": False, "count_expert_tokens": True,
    "data_parallel_size": 2, "kv_cache_memory_bytes": 1 << 26,
}  # fmt: skip


def test_with_and_without_requests(checkpoint: Path, model: Any) -> None:  # noqa: F811
    with LLM(checkpoint, **SETTINGS) as llm:
        counted = here.check(model, llm, here.PROMPTS[:1], **CLOSE)
        for prompts in (here.PROMPTS, here.PROMPTS[2:3], here.PROMPTS * 3):
            counted += here.check(model, llm, prompts, **CLOSE)
        found = llm.llm_engine.core.stats().expert_tokens
        assert [sum(row) for row in found] == counted.sum(1).tolist()
