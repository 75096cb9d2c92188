"""The ranks of an engine sleep and wake up together, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM, SamplingParams
from graphllm.engine.process.sleep_orders import SleepError
from tests.artifacts import LIMITS

EAGER: dict[str, Any] = {"target": "cpu", "backend": "eager", "dtype": "float32", "seed": 3, **LIMITS}
PROMPTS = ["hello world, the cat", "what is the answer", "hello"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
RANK = "tests.engine.rank_functions:"

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module", params=["tensor_parallel_size", "pipeline_parallel_size"])
def two(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, enable_sleep_mode=True, **{request.param: 2}, **EAGER) as llm:
        yield llm


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("level", [1, 2])
def test_texts_are_as_before(two: LLM, level: int) -> None:
    before, awake = texts(two), two.collective_rpc(RANK + "asleep")
    for number, prompt in enumerate(PROMPTS):
        two.llm_engine.add_request(str(number), prompt, GREEDY)
    for _ in range(4):
        two.llm_engine.step()
    two.sleep(level, "keep")
    for (tags, zeros), (_, usual) in zip(two.collective_rpc(RANK + "asleep"), awake, strict=True):
        assert tags == ["kv_cache", "weights"]
        assert (zeros > usual) == (level == 2)
    two.wake_up(["weights"])
    assert two.collective_rpc(RANK + "asleep") == [[["kv_cache"], usual] for _, usual in awake]
    two.wake_up()
    found = {}
    while two.llm_engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].text for output in two.llm_engine.step() if output.finished}
    assert [found[str(number)] for number in range(len(PROMPTS))] == before
    assert texts(two) == before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["map", "finish"])
def test_one_rank_cannot_wake_up(two: LLM, rank: int, method: str) -> None:
    before = texts(two)
    two.sleep(2)
    two.collective_rpc(RANK + "break_sleep", args=(rank, method))
    message = f"wake_up: rank {rank}: memory: none is left; the engine is asleep as before"
    with pytest.raises(SleepError, match=message):
        two.wake_up()
    assert two.is_sleeping()
    assert [found[0] for found in two.collective_rpc(RANK + "asleep")] == [["kv_cache", "weights"]] * 2
    two.wake_up()
    assert texts(two) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_cannot_fall_asleep(two: LLM, rank: int) -> None:
    before = texts(two)
    two.collective_rpc(RANK + "break_sleep", args=(rank, "save"))
    with pytest.raises(SleepError, match=f"sleep: rank {rank}: memory: none is left; the engine is awake as before"):
        two.sleep(2)
    assert not two.is_sleeping()
    assert [found[0] for found in two.collective_rpc(RANK + "asleep")] == [[]] * 2
    assert texts(two) == before
