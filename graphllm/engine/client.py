"""CoreClient: an engine core in a child process, as the front sees it: requests, updates, health, and how it died."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from graphllm.config import ConfigError, CoreConfig
from graphllm.engine.messages import (
    Abort,
    Add,
    BadMessage,
    Dead,
    DeathCause,
    EngineDeadError,
    FromCore,
    GetStats,
    Heartbeat,
    Launch,
    Ready,
    Rejected,
    Reply,
    ResetPrefixCache,
    Shutdown,
    Updates,
)
from graphllm.engine.request import CoreStats, EngineRequest
from graphllm.engine.spawn import COMMAND, Child, spawn

_log = logging.getLogger(__name__)


class Health(NamedTuple):
    """seconds: loading ("starting"), without a heartbeat ("unresponsive"), in one step ("stuck"), since the death
    ("dead"); 0 when "ready". cause: of the death."""

    state: Literal["starting", "ready", "unresponsive", "stuck", "dead"]
    seconds: float = 0.0
    cause: DeathCause | None = None


class CoreClient:
    """One engine core in a child process, from the event loop that calls `start`."""

    def __init__(
        self,
        settings: CoreConfig | Mapping[str, Any],
        command: Sequence[str] = COMMAND,
        *,
        heartbeat: float = 0.5,
        unresponsive: float = 10.0,
        stuck: float = 60.0,
        grace: float = 5.0,
        child: Child | None = None,
    ) -> None:
        """settings: a `CoreConfig`, or what else ``command`` takes. command: starts a program that calls `run_core`.
        child: one that has been started already, instead.

        Seconds: between heartbeats; of silence until the core counts as unresponsive; of one step, without the end of
        a kernel, until it counts as stuck; that an orderly end may take before it is forced.
        """
        self._settings, self._command = msgspec.to_builtins(settings), list(command)
        self._heartbeat, self._unresponsive, self._stuck = heartbeat, unresponsive, stuck
        self._tick, self._grace = heartbeat / 2, grace
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromCore).decode
        self._child = child
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count()
        self._news: asyncio.Queue[Updates | Rejected | None] = asyncio.Queue()
        self._silent = 0.0  # seconds; counted in ticks of this loop, so that a front that was held up accuses nobody
        self._beat: Heartbeat | None = None
        self._cause: DeathCause | None = None
        self._since = time.monotonic()  # launched or, later, died
        self._closing = False
        self._loaded: asyncio.Future[Ready] | None = None
        self.ready: Ready | None = None

    @property
    def pid(self) -> int:
        """Of the child."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Ready:
        """Start the child and wait until its core is loaded. Raises ConfigError for settings that cannot be loaded,
        and EngineDeadError if it dies otherwise, or was closed. Call it once."""
        if self._cause is not None:
            raise EngineDeadError(self._cause)
        self._folder = tempfile.mkdtemp(prefix="graphllm-")  # mode 0700
        child = self._child or spawn(self._command)
        launch = Launch(self._settings, self._folder, self._heartbeat, child.started)
        self._context = zmq.asyncio.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(launch.address("front"))
        self._outbox = zmq.Context(self._context).socket(zmq.PUSH)  # never waits, so it needs no asyncio
        self._outbox.set(zmq.SNDHWM, 0)
        self._outbox.bind(launch.address("core"))
        self._since = launch.started
        self._process = child.process
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which _watch reports
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._process.stdin.flush()
        self._loaded = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        try:
            ready = await self._loaded
            # The child may attach to this socket after its first message came by the other; until then, what is sent is
            # lost.
            while not self._outbox.poll(0, zmq.POLLOUT) and self._cause is None:
                await asyncio.sleep(0.001)
            return ready
        except EngineDeadError as e:
            self.kill()
            if e.cause.kind == "config":
                raise ConfigError(e.cause.message) from e
            raise
        except BaseException:
            self.kill()
            raise

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Send the siblings of one user's request. Raises EngineDeadError; a refusal comes as Rejected."""
        self._send(Add(list(requests)))

    def abort(self, ids: Iterable[str]) -> None:
        """Unknown ids are ignored. Raises EngineDeadError."""
        self._send(Abort(list(ids)))

    async def stats(self) -> CoreStats:
        """Answered between two steps. Raises EngineDeadError."""
        reply = await self._call(GetStats)
        assert reply.stats is not None
        return reply.stats

    async def reset_prefix_cache(self) -> bool:
        """False when the core could not. Raises EngineDeadError."""
        return (await self._call(ResetPrefixCache)).reset

    async def updates(self) -> AsyncIterator[Updates | Rejected]:
        """What the core says of requests, for one reader; ends when the client is closed. Raises EngineDeadError."""
        while (news := await self._news.get()) is not None:
            yield news
        if self._cause is not None and self._cause.kind != "closed":
            raise EngineDeadError(self._cause)

    def health(self) -> Health:
        """The state of the core, from what has been heard of it."""
        if self._cause is not None:
            return Health("dead", time.monotonic() - self._since, self._cause)
        if self._silent > self._unresponsive:
            return Health("unresponsive", self._silent)
        if self.ready is None:
            return Health("starting", time.monotonic() - self._since)
        if self._beat is not None and self._beat.activity == "step" and self._beat.quiet > self._stuck:
            return Health("stuck", self._beat.quiet)
        return Health("ready")

    async def close(self, drain_timeout: float = 0.0) -> None:
        """End the core; with ``drain_timeout``, give it so many seconds to finish its requests. `updates` ends."""
        child = self._process
        if child is None:
            self.kill()
            return
        self._closing = True
        if self._cause is None and self.ready is not None:
            self._send(Shutdown(drain=drain_timeout > 0))
            await self._exit(child, drain_timeout + self._grace)
        if child.poll() is None:
            child.terminate()
            await self._exit(child, self._grace)
        await asyncio.sleep(self._tick)  # its last words are still on their way
        self.kill(0)

    def kill(self, grace: float | None = None) -> None:
        """End the core without asking: SIGTERM, and SIGKILL after ``grace`` seconds; this call waits for the end."""
        closed = DeathCause(kind="closed", message="the engine was shut down")
        if self._process is None:
            self._end(closed)
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(self._grace if grace is None else grace)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._end(closed)
        for task in self._tasks:
            task.cancel()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process = None

    async def _exit(self, child: subprocess.Popen[bytes], seconds: float) -> None:
        """Wait for its end, so long."""
        deadline = time.monotonic() + seconds
        while child.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(self._tick / 4)

    async def _call(self, question: type[GetStats] | type[ResetPrefixCache]) -> Reply:
        number = next(self._numbers)
        self._send(question(number))
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._calls[number]
        finally:
            del self._calls[number]

    def _send(self, message: msgspec.Struct) -> None:
        if self._cause is not None:
            raise EngineDeadError(self._cause)
        with contextlib.suppress(zmq.Again):  # the other end is gone, which _watch reports
            self._outbox.send(self._encode(message), zmq.NOBLOCK)

    async def _receive(self) -> None:
        while True:
            data = await self._inbox.recv()
            self._silent = 0.0
            try:
                message = self._decode(data)
            except msgspec.MsgspecError as e:
                self._end(DeathCause(kind="protocol", message=f"unreadable message of {len(data)} bytes: {e}"))
                return
            match message:
                case Updates() | Rejected():
                    self._news.put_nowait(message)
                case Heartbeat():
                    self._beat = message
                case Reply(call):
                    waiting = self._calls.get(call)
                    if waiting is not None and not waiting.done():  # else the caller has gone
                        waiting.set_result(message)
                case Ready():
                    self.ready = message
                    if self._loaded is not None and not self._loaded.done():
                        self._loaded.set_result(message)
                case BadMessage(text):
                    _log.warning("the engine core ignored a message it could not read: %s", text)
                case Dead(cause):
                    self._end(cause)

    async def _watch(self) -> None:
        child = self._process
        assert child is not None
        while child.poll() is None:
            await asyncio.sleep(self._tick)
            self._silent += self._tick
        await asyncio.sleep(self._tick)  # its last words are still on their way
        if not self._closing:
            self._end(self._exit_cause(child.returncode))

    def _exit_cause(self, code: int) -> DeathCause:
        when = " while loading" if self.ready is None else ""
        steps = self._beat.steps if self._beat else 0
        if code >= 0:
            return DeathCause(kind="exit", message=f"exited with code {code}{when}", steps=steps)
        hint = " (out of memory?)" if code == -signal.SIGKILL else f" ({signal.Signals(-code).name})"
        return DeathCause(kind="signal", message=f"killed by signal {-code}{when}{hint}", steps=steps)

    def _end(self, cause: DeathCause) -> None:
        """Only the first cause counts."""
        if self._cause is not None:
            return
        self._cause, self._since = cause, time.monotonic()
        futures: list[asyncio.Future[Any] | None] = [self._loaded, *self._calls.values()]
        for waiting in futures:
            if waiting is not None and not waiting.done():
                waiting.set_exception(EngineDeadError(cause))
        self._news.put_nowait(None)
