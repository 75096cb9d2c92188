"""The core process and its client, with a stub core in a real child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from graphllm.engine.process import messages
from graphllm.engine.process.core_client import CoreClient, Health
from graphllm.engine.process.core_link import CoreLink
from graphllm.engine.process.messages import DeathCause, EngineDeadError, Rejected
from graphllm.engine.requests.request import EngineRequest
from tests.engine.stub_process import COMMAND, VOCAB, expected
from tests.waiting import PATIENCE, gone, until, until_async


def request(id: str, prompt: list[int], limit: int) -> EngineRequest:
    return EngineRequest(id=id, prompt=prompt, params=SamplingParams(), stop_ids=[], limit=limit, seed=0)


@contextlib.asynccontextmanager
async def running(settings: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[CoreClient]:
    """A started client, closed afterwards."""
    client = CoreClient(settings or {}, COMMAND, **{"heartbeat": 0.1, "grace": 1.0, **options})
    async with asyncio.timeout(PATIENCE):
        await client.start()
        try:
            yield client
        finally:
            await client.close()


async def collect(client: CoreLink, count: int) -> dict[str, tuple[list[int], str | None]]:
    """Tokens and finish reason by id, once ``count`` requests are done."""
    tokens: dict[str, list[int]] = {}
    ended: dict[str, str | None] = {}
    async for news in client.updates():
        assert not isinstance(news, Rejected), news
        for update in news.updates:
            tokens.setdefault(update.id, []).extend(update.tokens)
            if update.finish_reason:
                ended[update.id] = update.finish_reason
        if len(ended) == count:
            break
    return {id: (tokens[id], ended[id]) for id in ended}


async def death(client: CoreClient) -> DeathCause:
    """What `updates` raises."""
    with pytest.raises(EngineDeadError) as caught:
        async for _ in client.updates():
            pass
    return caught.value.cause


async def reached(client: CoreClient, state: str) -> Health:
    return await until_async(lambda: (found := client.health()).state == state and found)


async def ready_until(client: CoreClient, done: Callable[[], object]) -> None:
    """It is ready all the time."""

    def look() -> object:
        assert client.health().state == "ready"
        return done()

    await until_async(look)


def test_loading_begins_while_modules_are_imported() -> None:
    async def run() -> None:
        client = CoreClient({}, (*COMMAND, "--meanwhile"), heartbeat=0.1, grace=1.0)
        async with asyncio.timeout(PATIENCE):
            await client.start()
            client.add([request("r", [1], 3)])
            assert await collect(client, 1) == {"r": (expected([1], 3), "length")}
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", b"{"], ids=["nothing", "half a line"])
def test_settings_that_never_come(said: bytes) -> None:
    done = subprocess.run(COMMAND, input=said, capture_output=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert b"no settings on stdin" in done.stderr


def test_many_requests_get_their_tokens() -> None:
    async def run() -> None:
        async with running() as client:
            assert client.ready is not None
            assert client.ready.info.vocab == VOCAB
            assert client.ready.phases["weights"] == 0.25
            assert client.ready.phases["process"] > 0
            prompts = {str(i): [i, 2 * i, 5] for i in range(64)}
            for id, prompt in prompts.items():
                client.add([request(id, prompt, 10 + int(id))])
            found = await collect(client, 64)
            assert found == {id: (expected(p, 10 + int(id)), "length") for id, p in prompts.items()}
            assert client.health() == Health("ready")

    asyncio.run(run())


def test_what_is_cold_is_warmed_up_between_requests() -> None:
    async def run() -> None:
        async with running({"cold": 40}) as client:
            client.add([request("first", [1], 3)])
            assert await collect(client, 1) == {"first": (expected([1], 3), "length")}
            assert (await client.stats()).waiting > 0  # the request did not wait for all of it
            while (await client.stats()).waiting:
                pass
            client.add([request("later", [2], 3)])
            assert await collect(client, 1) == {"later": (expected([2], 3), "length")}

    asyncio.run(run())


def test_sigterm_while_something_is_warmed_up() -> None:
    """That is let finish: it is no failure."""

    async def run() -> None:
        async with running({"cold": 1000}) as client:
            while (await client.stats()).waiting > 990:
                pass
            os.kill(client.pid, signal.SIGTERM)
            assert (await death(client)).kind == "terminated"

    asyncio.run(run())


def test_abort_ends_a_request() -> None:
    async def run() -> None:
        async with running({"step": 0.01}) as client:
            client.add([request("a", [1], 10**9), request("b", [2], 10**9)])
            while (await client.stats()).steps < 3:
                pass
            assert (await client.stats()).running == 2
            client.abort(["a", "unknown"])
            client.abort(["b"])  # the last one: its update needs a step although nothing is left
            found = await collect(client, 2)
            assert {reason for _, reason in found.values()} == {"abort"}
            assert found["a"][0] == expected([1], len(found["a"][0]))
            assert (await client.stats()).running == 0

    asyncio.run(run())


def test_calls_are_answered_while_steps_run() -> None:
    async def run() -> None:
        async with running({"step": 0.01}) as client:
            assert await client.reset_prefix_cache()
            client.add([request("a", [1], 10**9)])
            answers = await asyncio.gather(client.reset_prefix_cache(), client.stats(), client.stats())
            assert answers[0] is False
            assert answers[1].running == answers[2].running == 1

    asyncio.run(run())


def test_refusals_name_their_kind_and_take_siblings_along() -> None:
    async def run() -> None:
        async with running({"queue": 2, "step": 0.01}) as client:
            news = client.updates()
            client.add([request("bad", [], 1)])
            assert await anext(news) == Rejected(["bad"], "prompt is empty", "invalid")
            client.add([request(id, [1], 10**9) for id in "abc"])
            refused = await anext(news)
            assert refused == Rejected(["a", "b", "c"], "2 requests wait; try again later", "queue_full")
            assert (await client.stats()).running == 0
            client.add([request("d", [3], 4)])
            assert (await collect(client, 3))["d"] == (expected([3], 4), "length")  # after the aborts of a and b

    asyncio.run(run())


def test_an_exception_in_the_core_is_told_in_full() -> None:
    async def run() -> None:
        async with running({"fail_at": 5}) as client:
            pid = client.pid
            client.add([request("short", [1], 2)])
            client.add([request("long", [1], 100)])
            cause = await death(client)
            assert cause.kind == "exception"
            assert cause.message == "ZeroDivisionError: the stub fails as told"
            assert "in step" in cause.traceback
            assert cause.steps == 4
            assert cause.running == ["long"]
            assert client.health().state == "dead"
            assert client.health().cause == cause
            with pytest.raises(EngineDeadError, match="the stub fails as told"):
                client.add([request("late", [1], 2)])
            with pytest.raises(EngineDeadError):
                await client.stats()
            await until_async(lambda: gone(pid))

    asyncio.run(run())


def test_exit_code_after_an_exception(tmp_path: Path) -> None:
    """Seen by whoever else watches the process."""
    launch = messages.Launch({"load": "error"}, str(tmp_path), "first", 0.1, time.monotonic())
    child = subprocess.run(COMMAND, input=msgspec.json.encode(launch) + b"\n", timeout=PATIENCE)
    assert child.returncode == 1


def test_a_killed_core_is_told_by_its_signal() -> None:
    async def run() -> None:
        async with running({"step": 0.01}) as client:
            client.add([request("a", [1], 10**9)])
            waiting = asyncio.create_task(death(client))
            await until_async(lambda: client._beat is not None and client._beat.steps)
            os.kill(client.pid, signal.SIGKILL)
            cause = await waiting
            assert cause.kind == "signal"
            assert cause.message.startswith("killed by signal 9")
            assert cause.steps > 0
            assert client.health().state == "dead"

    asyncio.run(run())


def test_a_stopped_core_is_unresponsive_until_it_goes_on() -> None:
    async def run() -> None:
        async with running({"step": 0.01}, unresponsive=0.5, stuck=100) as client:
            client.add([request("a", [1], 10**9)])
            await reached(client, "ready")
            os.kill(client.pid, signal.SIGSTOP)
            health = await reached(client, "unresponsive")
            assert health.seconds > 0.5  # as set
            os.kill(client.pid, signal.SIGCONT)
            await reached(client, "ready")
            assert (await client.stats()).running == 1

    asyncio.run(run())


def test_a_held_up_front_does_not_blame_the_core() -> None:
    async def run() -> None:
        async with running(unresponsive=0.5) as client:
            beat = client._beat
            time.sleep(2)  # nothing else can hold up this loop for longer than a core may be silent
            await ready_until(client, lambda: client._beat is not beat)

    asyncio.run(run())


def test_a_hanging_step_is_stuck_but_alive() -> None:
    async def run() -> None:
        async with running({"hang_at": 3}, unresponsive=100, stuck=0.5, grace=0.3) as client:
            pid = client.pid
            client.add([request("a", [1], 10**9)])
            health = await reached(client, "stuck")
            assert health.seconds > 0.5  # as set
            await until_async(lambda: client.health().seconds > health.seconds)  # heartbeats go on
            assert client.health().state == "stuck"
            await client.close()
            assert gone(pid)

    asyncio.run(run())


@pytest.mark.thorough
def test_a_slow_step_whose_kernels_end_is_not_stuck() -> None:
    async def run() -> None:
        async with running({"step": 3.0, "kernels": 30}, stuck=1.5) as client:
            client.add([request("a", [1], 1)])
            await ready_until(client, asyncio.create_task(collect(client, 1)).done)

    asyncio.run(run())


@pytest.mark.thorough
def test_a_long_idle_time_is_not_stuck() -> None:
    async def run() -> None:
        async with running({"step": 0.3}, stuck=2.0) as client:
            begun = await until_async(lambda: client._beat)
            await ready_until(client, lambda: client._beat.at - begun.at > 2.0)  # idle for as long as a step may take
            client.add([request("a", [1], 8)])  # 2.4 s of work in steps of 0.3
            await ready_until(client, asyncio.create_task(collect(client, 1)).done)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("load", "kind", "message"),
    [
        ("error", "exception", "RuntimeError: no weights here"),
        ("exit", "exit", "exited with code 3 while loading"),
    ],
)
def test_a_failed_start_says_why(load: str, kind: str, message: str) -> None:
    async def run() -> None:
        with pytest.raises(EngineDeadError) as caught:
            async with running({"load": load}):
                pass
        assert (caught.value.cause.kind, caught.value.cause.message) == (kind, message)
        assert ("in __init__" in caught.value.cause.traceback) == (kind == "exception")

    asyncio.run(run())


def test_settings_that_cannot_be_loaded_are_the_users_mistake() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=r"^kv cache: too small; give more$"):
            async with running({"load": "config"}):
                pass

    asyncio.run(run())


def test_giving_up_on_a_long_start_ends_the_child() -> None:
    async def run() -> None:
        client = CoreClient({"load": "hang"}, COMMAND, heartbeat=0.1, grace=1.0)
        start = asyncio.create_task(client.start())
        await until_async(lambda: client._beat)
        pid = client.pid
        assert client.health().state == "starting"
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert gone(pid)

    asyncio.run(run())


def test_close_can_wait_for_the_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with running({"step": 0.02, "closed": str(tmp_path / "closed")}) as client:
            folder = Path(client.folder)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            client.add([request("a", [1], 50)])
            while (await client.stats()).steps == 0:
                pass
            closing = asyncio.create_task(client.close(drain_timeout=100))
            assert await collect(client, 1) == {"a": (expected([1], 50), "length")}
            await closing
            assert [news async for news in client.updates()] == []  # it ends, without an error
            assert (tmp_path / "closed").exists()
            assert not folder.exists()
            with pytest.raises(EngineDeadError, match="shut down"):
                client.add([request("b", [1], 1)])

    asyncio.run(run())


def test_a_draining_core_takes_no_more() -> None:
    async def run() -> None:
        async with running({"step": 0.02}) as client:
            client.add([request("a", [1], 50)])
            closing = asyncio.create_task(client.close(drain_timeout=100))
            await asyncio.sleep(0)  # it has told the core
            client.add([request("b", [1], 1)])
            refusals = [news async for news in client.updates() if isinstance(news, Rejected)]
            assert [(r.ids, r.kind) for r in refusals] == [(["b"], "closing")]
            await closing

    asyncio.run(run())


@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_ends_the_core_in_good_order(tmp_path: Path, busy: bool) -> None:
    async def run() -> None:
        async with running({"step": 0.02, "closed": str(tmp_path / "closed")}) as client:
            if busy:
                client.add([request("a", [1], 10**9)])
            while busy and (await client.stats()).steps == 0:
                pass
            child = client._process
            assert child is not None
            os.kill(client.pid, signal.SIGTERM)
            cause = await death(client)
            assert (cause.kind, cause.running) == ("terminated", ["a"] if busy else [])
            await until_async(lambda: child.poll() is not None)
            assert child.returncode == 0
            assert (tmp_path / "closed").exists()

    asyncio.run(run())


PARENT = """
import asyncio, sys, time
from graphllm.engine.process.core_client import CoreClient
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.request import EngineRequest
async def run():
    client = CoreClient({settings}, (sys.executable, {stub!r}), heartbeat=0.1)
    await client.start()
    client.add([EngineRequest(id="a", prompt=[1], params=SamplingParams(), stop_ids=[], limit=10**9, seed=0)])
    while client._beat is None or client._beat.activity != "step":
        await asyncio.sleep(0.01)
    print(client.pid, client.folder, flush=True)
    time.sleep(1000)
asyncio.run(run())
"""


@pytest.mark.thorough
def test_the_child_ends_with_its_parent() -> None:
    """A busy one, and two that hang, which notice it after some seconds: all at once, to wait only once."""
    children: dict[str, tuple[int, Path]] = {}
    with contextlib.ExitStack() as parents:
        for name, settings in (("busy", {"step": 0.01}), ("hung", {"hang_at": 3}), ("hung soon", {"hang_at": 1})):
            script = PARENT.format(settings=settings, stub=COMMAND[1])
            command = [sys.executable, "-c", script]
            parent = parents.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            parents.callback(parent.kill)
            assert parent.stdout is not None
            pid, folder = parent.stdout.readline().split()
            children[name] = int(pid), Path(folder)
        assert not [name for name, (pid, _) in children.items() if gone(pid)]
    for name, (pid, folder) in children.items():
        until(lambda pid=pid: gone(pid), what=name)
        assert not folder.exists(), name


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_unreadable_messages_are_reported_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pickle among them: nothing may unpickle it."""
    bad = [b"", b"\xc1", b"\x81\xa4type\xa3Add", b"\xff" * 10_000, pickle.dumps(_Bomb(tmp_path / "bomb"))]

    async def run() -> None:
        async with running() as client:
            for data in bad:
                client._send_bytes(data)
            client.add([request("a", [1], 5)])
            assert await collect(client, 1) == {"a": (expected([1], 5), "length")}

    asyncio.run(run())
    reports = [r.message for r in caplog.records if "ignored a message" in r.message]
    assert len(reports) == len(bad)
    assert "10000 bytes" in reports[3]
    assert not (tmp_path / "bomb").exists()


def test_several_fronts_of_one_core() -> None:
    """Each is told of its own requests alone; those of one that is gone, waiting ones too, leave no trace."""

    async def run() -> None:
        async with running({"step": 0.005}) as client:
            links = [CoreLink(f"front-{i}") for i in range(3)]
            for link in links:
                assert await link.connect(client.folder) == client.ready
            for i, link in enumerate([client, *links]):
                link.add([request(f"{i}-{k}", [i, k], 20 + k) for k in range(8)])
            for i, link in enumerate([client, *links]):
                found = await collect(link, 8)
                assert found == {f"{i}-{k}": (expected([i, k], 20 + k), "length") for k in range(8)}
            links[0].add([request(f"endless-{k}", [1], 10**9) for k in range(5)])
            links[1].add([request("other", [2], 30)])
            while (await links[2].stats()).running < 6:
                pass
            links[0].disconnect()
            assert await collect(links[1], 1) == {"other": (expected([2], 30), "length")}
            while (await links[2].stats()).running:
                pass
            again = CoreLink("front-0")  # the same name is free
            await again.connect(client.folder)
            again.add([request("again", [3], 5)])
            assert await collect(again, 1) == {"again": (expected([3], 5), "length")}
            for link in (links[1], links[2], again):
                link.disconnect()

    asyncio.run(run())


def test_requests_arrive_as_they_were_sent() -> None:
    params = SamplingParams(
        n=2, seed=-5, stop=["a", "b"], stop_token_ids=[3], logit_bias={5: 1.5}, allowed_token_ids=[1, 2, 5],
        bad_words=["x"], logprobs=-1, output_kind=RequestOutputKind.DELTA, extra_args={"mine": [1, {"deep": None}]},
        structured_outputs=StructuredOutputsParams(json={"type": "object", "properties": {"a": {}}}),
    )  # fmt: skip
    sent = EngineRequest(
        id="a", prompt=[1], params=params, stop_ids=[2, 3], limit=7, seed=-(2**63), priority=-1, cache_salt="s",
        fork_of="b", arrival=1.5,
    )  # fmt: skip
    message = messages.Add([sent])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=messages.ToCore) == message


def test_an_unreadable_core_is_dead() -> None:
    async def run() -> None:
        async with running() as client:
            with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
                socket.connect(f"ipc://{client.folder}/heartbeats")
                socket.send(b"nonsense")
                cause = await death(client)
            assert cause.kind == "protocol"
            assert "8 bytes" in cause.message

    asyncio.run(run())


def test_an_idle_core_uses_no_cpu() -> None:
    resolution = 1 / os.sysconf("SC_CLK_TCK")

    def used(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) * resolution

    async def run() -> None:
        async with running(heartbeat=0.5) as client:
            client.add([request("a", [1], 5)])
            await collect(client, 1)
            begun, before = client._beat.at, used(client.pid)
            await until_async(lambda: client._beat.at - begun > 100 * resolution)
            assert used(client.pid) - before <= (client._beat.at - begun) / 20  # a spinning loop takes all of it

    asyncio.run(run())


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run() -> None:
        async with running():
            assert len(list(tmp_path.iterdir())) == 1
        with pytest.raises(EngineDeadError):
            async with running({"load": "exit"}):
                pass

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []
