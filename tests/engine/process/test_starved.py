"""A process of an engine that gets no processor is not called dead: the engine waits for it, and goes on with it. One
that does not take the processor it could have is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from graphllm import LLM, SamplingParams
from graphllm.engine.process.core_link import CoreLink
from graphllm.engine.process.messages import Hello, Ready, ToCore, address
from graphllm.runtime.ranks.rank_failure import RankError
from tests.engine import rank_functions, stub_core
from tests.engine.process.test_process import running
from tests.engine.ranks.test_ranks import EAGER, PROMPTS, pids_of
from tests.engine.starving import busy_loops, starved, without_a_turn
from tests.waiting import gone, until

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = 8.0  # seconds, more than those of silence after which a process counts as dead


@pytest.mark.slow
def test_a_rank_without_a_turn(checkpoint: Path) -> None:
    with LLM(checkpoint, tensor_parallel_size=2, **EAGER) as llm:
        expected = llm.generate(PROMPTS, GREEDY)
        (pid,) = pids_of(llm)
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, GREEDY)))
        with starved(pid):
            asking.start()
            for _ in without_a_turn(pid, LONG):
                time.sleep(0.2)
        asking.join()
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.slow
def test_a_core_that_gets_few_turns() -> None:
    async def run() -> None:
        async with running({"step": 0.01}, unresponsive=2.0, stuck=2.0) as client:
            with starved(client.pid):  # its heartbeats come seconds apart
                for _ in range(200):
                    await asyncio.sleep(0.05)
                    assert client.health().state == "ready"
            assert (await client.stats()).running == 0

    asyncio.run(run())


@pytest.mark.slow
def test_an_engine_that_starts_on_a_machine_that_is_busy(checkpoint: Path) -> None:
    program = (
        "from graphllm import LLM, SamplingParams;"
        f"llm = LLM({str(checkpoint)!r}, tensor_parallel_size=2, **{EAGER!r});"
        f"print([list(o.outputs[0].token_ids) for o in llm.generate({PROMPTS!r}, SamplingParams("
        "temperature=0.0, max_tokens=6, ignore_eos=True))], flush=True);"
        "llm.close()"
    )
    command = ["nice", "-n", "19", sys.executable, "-c", program]
    with LLM(checkpoint, **EAGER) as llm:
        expected = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
    with busy_loops(6):
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.stdout.splitlines()[-1:] == [str(expected)], told.stderr


@pytest.mark.slow
def test_a_rank_that_keeps_the_interpreter(checkpoint: Path) -> None:
    """A call that does not come back and gives nobody else a turn in its process."""
    with LLM(checkpoint, tensor_parallel_size=2, **EAGER) as llm:
        (pid,) = pids_of(llm)
        with pytest.raises(RankError, match=r"rank 1 of 2 \(process \d+\) has given no sign of life for 5 seconds"):
            llm.collective_rpc(rank_functions.hang, args=(1,))
    until(lambda: gone(pid))


def test_a_core_is_greeted_until_it_answers(tmp_path: Path) -> None:
    """It gives up an answer when the front is too slow to take it, and must not be waited for in vain."""

    async def run() -> None:
        context = zmq.asyncio.Context()
        requests, answers = context.socket(zmq.PULL), context.socket(zmq.ROUTER)
        requests.bind(address(str(tmp_path), "requests"))
        answers.bind(address(str(tmp_path), "answers"))
        link = CoreLink("slow")
        connecting = asyncio.create_task(link.connect(str(tmp_path)))
        for _ in range(2):
            front, said = await requests.recv_multipart()
            assert isinstance(msgspec.msgpack.decode(said, type=ToCore), Hello)
        await answers.send_multipart([front, msgspec.msgpack.encode(Ready(stub_core.info(8), {}))])
        assert (await connecting).info == stub_core.info(8)
        link.disconnect()
        context.destroy(linger=0)

    asyncio.run(run())
