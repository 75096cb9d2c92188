"""CoreClient: the engine core's process as its first front sees it: its start, health, death and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import zmq

from graphllm.config import ConfigError, CoreConfig
from graphllm.engine.process.core_link import CoreLink
from graphllm.engine.process.messages import (
    DeathCause,
    EngineDeadError,
    FromCore,
    Heartbeat,
    Launch,
    Ready,
    Shutdown,
    address,
)
from graphllm.engine.process.spawn import COMMAND, Child, spawn
from graphllm.host.silence import Silence, threads_of

_NAME = "first"


class Health(NamedTuple):
    """seconds: loading ("starting"), without a heartbeat ("unresponsive"), in one step ("stuck"), since the death
    ("dead"); 0 when "ready".
    cause: of the death.
    """

    state: Literal["starting", "ready", "unresponsive", "stuck", "dead"]
    seconds: float = 0.0
    cause: DeathCause | None = None


class CoreClient(CoreLink):
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
        cpus: Sequence[int] = (),
        gpus: str | None = None,
    ) -> None:
        """A client of a core; `start` starts its process.

        settings: a `CoreConfig`, or other settings that ``command`` takes.
        command: starts a program that calls `run_core`.
        heartbeat: seconds between heartbeats.
        unresponsive: seconds of silence until the core counts as unresponsive.
        stuck: seconds of one step without the end of a kernel until the core counts as stuck.
        grace: seconds that an orderly end may take before it is forced.
        child: a process that has been started already.
        cpus: CPUs that it may use; empty: all of this process's.
        gpus: as for `spawn`.

        Silence and steps are measured in time in which the core could run, see `Silence`.
        """
        super().__init__(_NAME)
        self._settings, self._command = msgspec.to_builtins(settings), list(command)
        self._heartbeat, self._unresponsive, self._stuck = heartbeat, unresponsive, stuck
        self._tick, self._grace = heartbeat / 2, grace
        self._child, self._cpus, self._gpus = child, cpus, gpus
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._silence = Silence(lambda: threads_of(self.pid), self._tick)
        self._beat: Heartbeat | None = None
        self._since = time.monotonic()  # launched or, later, died
        self._closing = False

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
        child = self._child or spawn(self._command, self._gpus)
        if self._cpus:
            with contextlib.suppress(ProcessLookupError):  # it is dead already, which _watch reports
                os.sched_setaffinity(child.process.pid, self._cpus)
        launch = Launch(self._settings, self._folder, self.name, self._heartbeat, child.started)
        heartbeats = self._open(self._folder).socket(zmq.PULL)
        heartbeats.bind(address(self._folder, "heartbeats"))
        self._since = launch.started
        self._process = child.process
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which _watch reports
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._process.stdin.flush()
        self._tasks += [asyncio.create_task(self._receive(heartbeats)), asyncio.create_task(self._watch())]
        try:
            return await self._until_ready()
        except EngineDeadError as e:
            self.kill()
            if e.cause.kind == "config":
                raise ConfigError(e.cause.message) from e
            raise
        except BaseException:
            self.kill()
            raise

    @property
    def folder(self) -> str:
        """Of the core's sockets, where other fronts `connect`; once it is started."""
        return self._folder

    @property
    def folders(self) -> list[str]:
        """The same of each core."""
        return [self._folder]

    def health(self) -> Health:
        """The state of the core, from what has been heard of it."""
        if self._cause is not None:
            return Health("dead", time.monotonic() - self._since, self._cause)
        if self._silence.seconds > self._unresponsive:
            return Health("unresponsive", self._silence.seconds)
        if self.ready is None:
            return Health("starting", time.monotonic() - self._since)
        if self._beat is not None and self._beat.activity == "step" and self._beat.quiet > self._stuck:
            return Health("stuck", self._beat.quiet)
        return Health("ready")

    def healths(self) -> list[Health]:
        """Of each core."""
        return [self.health()]

    async def close(self, drain_timeout: float = 0.0) -> None:
        """End the core. drain_timeout: seconds in which it may finish its requests. `updates` ends."""
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

    async def destroy(self) -> None:
        """End the core at once. Other tasks of this event loop go on."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            await self._exit(self._process, self._grace)
        self.kill(0)

    def kill(self, grace: float | None = None) -> None:
        """End the core without asking: SIGTERM, and SIGKILL after ``grace`` seconds; this call waits for the end."""
        closed = DeathCause(kind="closed", message="the engine was shut down")
        if self._process is None:
            self.end(closed)
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(self._grace if grace is None else grace)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.end(closed)
        self.disconnect()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process = None

    async def _exit(self, child: subprocess.Popen[bytes], seconds: float) -> None:
        """Wait for its end, so long."""
        deadline = time.monotonic() + seconds
        while child.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(self._tick / 4)

    def end(self, cause: DeathCause) -> None:
        """It is gone."""
        if self._cause is None:
            self._since = time.monotonic()
        super().end(cause)

    def _heard(self, message: FromCore) -> None:
        self._silence.heard()
        if isinstance(message, Heartbeat):
            self._beat = message
        super()._heard(message)

    async def _watch(self) -> None:
        child = self._process
        assert child is not None
        while child.poll() is None:
            await asyncio.sleep(self._tick)
            if self._beat is not None:  # before the first heartbeat it imports what it needs
                self._silence.look()
        await asyncio.sleep(self._tick)  # its last words are still on their way
        if not self._closing:
            self.end(self._exit_cause(child.returncode))

    def _exit_cause(self, code: int) -> DeathCause:
        when = " while loading" if self.ready is None else ""
        steps = self._beat.steps if self._beat else 0
        if code >= 0:
            return DeathCause(kind="exit", message=f"exited with code {code}{when}", steps=steps)
        hint = " (out of memory?)" if code == -signal.SIGKILL else f" ({signal.Signals(-code).name})"
        return DeathCause(kind="signal", message=f"killed by signal {-code}{when}{hint}", steps=steps)
