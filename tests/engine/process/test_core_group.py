"""Several cores behind one `AsyncLLM`, each a stub in a real child process (`stub_process.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.metrics.total_stats import total
from graphllm.engine.process.core_client import CoreClient
from graphllm.engine.process.core_group import CoreGroup
from graphllm.engine.process.messages import EngineDeadError
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.requests.request import BucketStats, CoreStats, QueueFullError, TierStats
from graphllm.entrypoints.async_llm import AsyncLLM
from tests.engine.stub_process import COMMAND, expected
from tests.waiting import PATIENCE, gone, until_async

STEP = {"step": 0.01}


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class Cores:
    """Makes clients and remembers them. settings: of the stub, for all cores or by number."""

    def __init__(self, *settings: dict[str, Any]) -> None:
        self._settings = settings
        self.made: list[CoreClient] = []

    def __call__(self, number: int) -> CoreClient:
        client = CoreClient(
            self._settings[number % len(self._settings)], COMMAND, heartbeat=0.1, grace=1.0, stuck=0.5, unresponsive=60
        )
        self.made.append(client)
        return client


@contextlib.asynccontextmanager
async def serving(cores: Cores, count: int = 2) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(CoreGroup(cores, count), None)
    async with asyncio.timeout(PATIENCE):
        await llm.start()
        try:
            yield llm
        finally:
            await llm.close()


async def tokens(llm: AsyncLLM, prompt: list[int], count: int, id: str, **options: Any) -> list[int]:
    found: list[int] = []
    params = SamplingParams(max_tokens=count, seed=0, temperature=0, detokenize=False, **options)
    async for output in llm.generate({"prompt_token_ids": prompt}, params, id):
        found = output.outputs[0].token_ids
    return list(found)


def running(llm: AsyncLLM) -> list[int]:
    return [len(llm._client.requests_of(core)) for core in (0, 1)]  # type: ignore[union-attr]


@in_a_loop
async def test_answers_are_right_and_both_cores_make_them() -> None:
    async with serving(Cores(STEP)) as llm:
        prompts = [[i, i + 1, 7] for i in range(12)]
        work = [asyncio.create_task(tokens(llm, p, 80, f"r{i}")) for i, p in enumerate(prompts)]
        await until_async(lambda: running(llm) == [6, 6])
        assert [s.running for s in await llm.cores.stats() if s] == [6, 6]
        assert (await llm.stats()).running == 12
        assert await asyncio.gather(*work) == [expected(p, 80) for p in prompts]
        assert running(llm) == [0, 0]
        assert await llm.reset_prefix_cache()
        assert llm.ready is not None
        assert llm.ready.info.max_num_seqs == 128  # of both together


@in_a_loop
async def test_aborts_reach_the_core_of_the_request() -> None:
    async with serving(Cores({"step": 0.02})) as llm:
        work = [asyncio.create_task(tokens(llm, [i], 90, f"r{i}")) for i in range(4)]
        await until_async(lambda: running(llm) == [2, 2])
        await llm.abort(["r0", "r1", "r3"])
        assert all(len(found) < 90 for found in await asyncio.gather(work[0], work[1], work[3]))
        assert sum(running(llm)) == 1
        assert await work[2] == expected([2], 90)


@in_a_loop
async def test_one_core_refuses_for_itself() -> None:
    async with serving(Cores({"step": 0.05, "queue": 1})) as llm:  # the first two run until the third has come
        work = [asyncio.create_task(tokens(llm, [i], 30, f"r{i}")) for i in range(3)]
        found = await asyncio.gather(*work, return_exceptions=True)
        assert [isinstance(one, QueueFullError) for one in found] == [False, False, True]
        assert found[:2] == [expected([i], 30) for i in range(2)]
        assert running(llm) == [0, 0]
        assert await tokens(llm, [9], 3, "next") == expected([9], 3)


@in_a_loop
async def test_a_killed_core_takes_its_own_requests_and_comes_back() -> None:
    cores = Cores(STEP)
    async with serving(cores) as llm:
        work = [asyncio.create_task(tokens(llm, [i], 90, f"r{i}")) for i in range(8)]
        await until_async(lambda: running(llm) == [4, 4])
        lost = llm._client.requests_of(1)  # type: ignore[union-attr]
        os.kill(cores.made[1].pid, signal.SIGKILL)
        found = await asyncio.gather(*work, return_exceptions=True)
        failed = [i for i, one in enumerate(found) if isinstance(one, BaseException)]
        assert sorted(id.split("-")[0] for id in lost) == [f"r{i}" for i in failed]
        assert len(failed) == 4
        assert all(isinstance(found[i], EngineDeadError) and "killed by signal 9" in str(found[i]) for i in failed)
        assert all(found[i] == expected([i], 90) for i in range(8) if i not in failed)
        assert [health.state for health in llm.cores.healths()] == ["ready", "dead"]
        assert llm.health().state == "ready"
        assert not llm.errored
        assert [stats is None for stats in await llm.cores.stats()] == [False, True]
        # What comes now goes to the other one, until it is back.
        assert await asyncio.gather(*(tokens(llm, [i], 5, f"s{i}") for i in range(4))) == [
            expected([i], 5) for i in range(4)
        ]
        await llm.cores.restart(1)
        work = [asyncio.create_task(tokens(llm, [i], 80, f"t{i}")) for i in range(4)]
        await until_async(lambda: running(llm) == [2, 2])
        assert await asyncio.gather(*work) == [expected([i], 80) for i in range(4)]
        pids = [cores.made[0].pid, cores.made[2].pid]
    assert gone(*pids)


@in_a_loop
async def test_with_all_cores_dead_requests_say_why() -> None:
    cores = Cores(STEP)
    async with serving(cores) as llm:
        for client in cores.made:
            os.kill(client.pid, signal.SIGKILL)
        await until_async(lambda: llm.health().state == "dead")
        assert llm.errored
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await tokens(llm, [1], 4, "r")
        with pytest.raises(EngineDeadError):
            await llm.stats()
        await llm.cores.restart(0)
        assert await tokens(llm, [1], 4, "s") == expected([1], 4)


@in_a_loop
async def test_a_stuck_core_gets_nothing_more() -> None:
    async with serving(Cores(STEP, {**STEP, "hang_at": 5})) as llm:
        work = [asyncio.create_task(tokens(llm, [i], 90, f"r{i}")) for i in range(4)]
        await until_async(lambda: [health.state for health in llm.cores.healths()] == ["ready", "stuck"])
        assert llm.cores.fail_requests(RuntimeError("stuck"), 1) == 2
        assert await tokens(llm, [5], 3, "s") == expected([5], 3)
        found = await asyncio.gather(*work, return_exceptions=True)
        assert sum(isinstance(one, RuntimeError) for one in found) == 2
        await llm.cores.restart(1)
        assert [health.state for health in llm.cores.healths()] == ["ready", "ready"]


@pytest.mark.parametrize(("load", "error"), [("config", ConfigError), ("exit", EngineDeadError)])
@in_a_loop
async def test_a_core_that_does_not_start_leaves_none(load: str, error: type[Exception]) -> None:
    cores = Cores(STEP, {"load": load})
    llm = AsyncLLM(CoreGroup(cores, 2), None)

    def pids() -> list[int]:
        found = [client.pid for client in cores.made if client._process is not None]
        return found if len(found) == 2 else []

    looking = asyncio.create_task(until_async(pids))
    with pytest.raises(error):
        await llm.start()
    started = await looking
    await until_async(lambda: gone(*started))


@in_a_loop
async def test_another_front_shares_the_cores_and_is_told_of_their_load() -> None:
    cores = Cores(STEP)
    async with serving(cores) as llm:
        folders = llm.cores.folders
        group = CoreGroup(lambda number: RemoteCore("second", folders[number], loads=True), 2)
        other = AsyncLLM(group, None, seed=5)
        await other.start()
        hold = [asyncio.create_task(tokens(llm, [i], 90, f"r{i}")) for i in range(6)]
        await until_async(lambda: [group._router.load(core) for core in (0, 1)] == [3, 3])
        assert await asyncio.gather(*(tokens(other, [i], 10, f"o{i}") for i in range(4))) == [
            expected([i], 10) for i in range(4)
        ]
        assert await asyncio.gather(*hold) == [expected([i], 90) for i in range(6)]
        await until_async(lambda: [group._router.load(core) for core in (0, 1)] == [0, 0])
        other.shutdown()


def test_the_total_of_several_cores() -> None:
    one = CoreStats(
        started=1.0, running=2, kv_usage=0.5, total_blocks=10, finished={"stop": 1}, accepted_tokens=[3, 1],
        expert_tokens=[[1, 2]], adapters_running=["a"], tiers={"host": TierStats(total_bytes=9, hit_tokens=2)},
    )  # fmt: skip
    two = CoreStats(
        started=2.0, running=3, kv_usage=0.1, total_blocks=30, finished={"stop": 2, "length": 4}, accepted_tokens=[5],
        expert_tokens=[[3, 4], [5, 6]], adapters_running=["b", "a"],
        tiers={"host": TierStats(total_bytes=9, hit_tokens=3), "disk": TierStats(used_bytes=1)},
    )  # fmt: skip
    for stats, seconds in ((one, 0.5), (two, 0.25)):
        stats.buckets = {"mixed": BucketStats(tokens=7, padding=2)}
        stats.buckets["mixed"].seconds.observe(seconds)
        stats.step_tokens.observe(4)
    found = total([one, two])
    assert (found.running, found.total_blocks, found.kv_usage) == (5, 40, (5 + 3) / 40)
    assert found.finished == {"stop": 3, "length": 4}
    assert found.accepted_tokens == [8, 1]
    assert found.expert_tokens == [[4, 6], [5, 6]]
    assert found.adapters_running == ["a", "b"]
    assert (found.buckets["mixed"].tokens, found.buckets["mixed"].padding) == (14, 4)
    assert (found.buckets["mixed"].seconds.total, sum(found.step_tokens.counts)) == (0.75, 2)
    assert found.tiers == {"host": TierStats(total_bytes=18, hit_tokens=5), "disk": TierStats(used_bytes=1)}
    assert (one.running, one.buckets["mixed"].tokens) == (2, 7)  # as they were
