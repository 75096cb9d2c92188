"""A GPU's memory is given back while an engine sleeps, and captured graphs are as they were afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm import LLM, SamplingParams
from graphllm.engine.process.sleep_orders import SleepError
from graphllm.runtime.sleeping.rank_sleep import KEY
from tests.artifacts import LIMITS, ON

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
PROMPTS = ["hello world, the cat", "what is the answer", "hello", "a list of words in a row"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
CACHE = 1 << 30  # bytes


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, enable_sleep_mode=True, kv_cache_memory_bytes=CACHE, **LIMITS | ON["cuda"]) as llm:
        yield llm


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("level", [1, 2])
def test_texts_are_as_before(llm: LLM, level: int) -> None:
    before = texts(llm)
    for _ in range(3):
        awake = free()
        llm.sleep(level)
        assert free() - awake > 0.9 * CACHE
        llm.wake_up(["weights"])
        assert free() - awake > 0.9 * CACHE
        llm.wake_up(["kv_cache"])
        assert abs(free() - awake) < 64 << 20
        assert texts(llm) == before


@pytest.mark.parametrize("level", [1, 2])
def test_waking_up_without_room(llm: LLM, level: int) -> None:
    """Another user of the GPU has taken what the engine gave back."""
    before = texts(llm)
    llm.sleep(level)
    taken = torch.empty(free() - CACHE // 2, dtype=torch.uint8, device="cuda")
    left = free()
    with pytest.raises(SleepError, match=r"the GPU has no .* left for kv_cache .*; the engine is asleep as before"):
        llm.wake_up()
    assert abs(free() - left) < 64 << 20
    del taken
    torch.cuda.empty_cache()
    llm.wake_up()
    assert texts(llm) == before


def test_closed_while_it_sleeps(checkpoint: Path) -> None:
    with LLM(checkpoint, enable_sleep_mode=True, kv_cache_memory_bytes=CACHE, **LIMITS | ON["cuda"]) as llm:
        texts(llm)
        executor: Any = llm.llm_engine.core.executor  # type: ignore[attr-defined]
        regions = list(executor.worker.kept[KEY]._memory._virtual.regions)
        assert sum(region.nbytes for region in regions) > CACHE
        llm.sleep(1)
        del regions
    awake = free()
    with LLM(checkpoint, enable_sleep_mode=True, kv_cache_memory_bytes=CACHE, **LIMITS | ON["cuda"]) as llm:
        texts(llm)
    assert awake - free() < 256 << 20
