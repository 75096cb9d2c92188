"""The controller of several fronts: starts them and brings dead ones back, hands them connections, tells them how the
engine does, and keeps what their requests share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from graphllm.host.silence import Silence, threads_of
from graphllm.loading.artifact.model import ResolvedModel
from graphllm.server.process.fronts.answers import Answers
from graphllm.server.process.fronts.connections import Connections
from graphllm.server.process.fronts.front_process import FrontProcess
from graphllm.server.process.fronts.messages import (
    AbortRequests,
    ControllerAsks,
    End,
    EngineState,
    FrontAnswer,
    FrontAsks,
    FrontLaunch,
    GetReport,
    GiveBack,
    Hello,
    Joined,
    Report,
    ServedModel,
    ToController,
    address,
)
from graphllm.server.process.fronts.questions import EndedError, Questions
from graphllm.server.process.options import ServerOptions
from graphllm.server.process.single_process import in_memory
from graphllm.server.service.stored_responses import ResponseStore
from graphllm.server.supervision.engine_supervisor import EngineSupervisor
from graphllm.server.supervision.metrics import Metrics

_log = logging.getLogger(__name__)
_COMMAND = (sys.executable, "-m", "graphllm.server.process.fronts.front")
_TICK = 0.1  # seconds between two looks at the fronts
_REPORTS = 1.0  # seconds between two reports of each: as much of what a dead one has counted may be lost
_ANSWER = 1.0  # seconds for a report that somebody waits for
_SILENT = 30.0  # seconds in which a front could have said a word, and has not, after which it is ended
_UNSEEN = 5.0  # seconds without a word in which nobody looks at whether it could
_BACKOFF = (0.5, 60.0)  # seconds before a front is started that ended soon: after the first time, and at most
_SOON = 10.0  # seconds
_LEAVING = 5.0  # seconds for the fronts' end


class Fronts:
    """As many as the options say; a connection goes to the front that has the fewest. `metrics` are the whole
    server's."""

    def __init__(self, supervisor: EngineSupervisor, options: ServerOptions) -> None:
        self._supervisor, self._options = supervisor, options
        self._fronts: dict[bytes, FrontProcess] = {}
        self._numbers = 0
        self._fast_ends = 0  # in a row
        self._ever_joined = self._was_ready = self._stopping = False
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._state: EngineState | None = None  # the one that fronts got last
        self._store = ResponseStore()
        name = options.names[0]
        self._metrics = Metrics(name, {"model": name}, self._processes, options.rank)
        self._shared = in_memory(_Overview(self), options.config, self._store, options.adapters)
        self._connections = Connections(self._fronts, self._later)
        self._answers = Answers(self._shared, self._store, self._fronts, self._send)
        self._encode = msgspec.json.Encoder().encode

    async def serve(self, listener: socket.socket) -> None:
        """Until `stop`. Raises RuntimeError when no front can be started."""
        self._connections.listen(listener)
        self._folder = tempfile.mkdtemp(prefix="graphllm-")  # mode 0700
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address(self._folder))
        for _ in range(self._options.config.serving.api_server_count):
            self._start()
        work = [asyncio.create_task(loop()) for loop in (self._receive, self._watch, self._report, self._publish)]
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({over, *work}, return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
        finally:
            self._stopping = self._connections.stopping = True
            self._connections.close()
            self._answers.cancel()
            for task in (over, *work, *self._tasks):
                task.cancel()
            for front in self._fronts.values():
                front.process.kill()
                front.process.wait()
            self._fronts.clear()
            context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def running(self) -> int:
        """Requests that are not finished."""
        return sum(report.running for report in await self.reports())

    async def stop(self) -> None:
        """Tell them to leave, and wait until they have."""
        self._stopping = self._connections.stopping = True
        for front in self._fronts.values():
            if front.greeted:
                self._send(front, End())
            else:
                front.process.kill()
        deadline = time.monotonic() + _LEAVING
        while time.monotonic() < deadline and any(f.process.poll() is None for f in self._fronts.values()):
            await asyncio.sleep(0.02)
        self._over.set()

    async def reports(self) -> Sequence[Report]:
        """Of each front; of one that does not answer, the latest."""

        async def ask(front: FrontProcess) -> Report:
            with contextlib.suppress(EndedError, TimeoutError):
                async with asyncio.timeout(_ANSWER):
                    front.report = await front.questions.ask(GetReport(), Report)
            return front.report

        # The metrics have already absorbed a front that has ended since.
        found = [(front, await report) for front, report in [(f, asyncio.ensure_future(ask(f))) for f in self._greeted]]
        return [report for front, report in found if front.name.encode() in self._fronts]

    async def abort(self, names: Sequence[str]) -> int:
        """End requests of all fronts, by the ids that clients gave them."""

        async def ask(front: FrontProcess) -> int:
            try:
                return await front.questions.ask(AbortRequests(list(names)), int)
            except EndedError:
                return 0

        return sum(await asyncio.gather(*map(ask, self._greeted)))

    @property
    def metrics(self) -> list[Metrics]:
        """Of the model."""
        return [self._metrics]

    @property
    def supervisor(self) -> EngineSupervisor:
        return self._supervisor

    @property
    def _greeted(self) -> list[FrontProcess]:
        return [front for front in self._fronts.values() if front.greeted]

    # ---- processes

    def _start(self) -> None:
        number, self._numbers = self._numbers, self._numbers + 1
        name = f"front-{number}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            # A session of its own: Ctrl-C is for this process. Its prints must not mix with the output.
            process = subprocess.Popen(
                (*_COMMAND, name),  # which is for those who look at processes
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            launch = FrontLaunch(name, number, self._folder, theirs.fileno(), self._options, self._supervisor.options)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which `_watch` sees
            process.stdin.write(msgspec.json.encode(launch, enc_hook=_path) + b"\n")
            process.stdin.flush()
        questions = Questions(lambda number, q: self._send(front, ControllerAsks(number, q)))
        front = FrontProcess(name, process, ours, questions, Silence(lambda: threads_of(process.pid), _TICK, _UNSEEN))
        self._fronts[name.encode()] = front
        asyncio.get_running_loop().add_reader(ours, self._connections.taken, front)

    async def _watch(self) -> None:
        """Bring back those that end, and end those that are silent."""
        while True:
            await asyncio.sleep(_TICK)
            for front in list(self._fronts.values()):
                if front.greeted and front.silence.look() > _SILENT:
                    _log.error("%s has been silent for %.0f s", front.name, front.silence.seconds)
                    front.process.kill()
                if front.process.poll() is not None and not self._stopping:
                    self._lost(front)

    def _lost(self, front: FrontProcess) -> None:
        code = front.process.returncode
        if not self._ever_joined:
            raise RuntimeError(f"{front.name} did not start: it ended with {code}")
        soon = time.monotonic() - front.started < _SOON
        self._fast_ends = self._fast_ends + 1 if soon else 0
        first, most = _BACKOFF
        pause = min(most, first * 2 ** (self._fast_ends - 1)) if soon else 0.0
        _log.error("%s has ended with %d; its streams are lost, another one starts", front.name, code)
        del self._fronts[front.name.encode()]
        self._connections.shut(front)
        front.doorway.close()
        if front.process.stdin is not None:
            front.process.stdin.close()
        front.questions.end()
        for ticket in list(front.rooms):
            front.give_back(ticket)
        for id in front.writing:
            if (record := self._store.get(id)) is not None:
                self._store.put(id, record.abandoned())
        self._metrics.absorb(front.report.counted)
        self._tell()
        self._later(pause, self._start_again)

    def _start_again(self) -> None:
        try:
            self._start()
        except OSError as problem:
            _log.error("no front can be started: %s", problem)
            self._later(_BACKOFF[1], self._start_again)

    def _later(self, seconds: float, work: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            if not self._stopping:
                work()

        task = asyncio.create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORTS)
            await self.reports()

    def _processes(self) -> dict[str, int]:
        return {"controller": os.getpid(), **{front.name: front.process.pid for front in self._fronts.values()}}

    # ---- the engine's state

    async def _publish(self) -> None:
        while True:
            await self._supervisor.changed.wait()
            self._supervisor.changed.clear()
            self._tell()

    def _tell(self, one: FrontProcess | None = None) -> None:
        """Tell every front what is new; one that has just come, what there is."""
        state = self._now()
        if state != self._state:
            self._state = state
            for front in self._greeted:
                self._send(front, state)
        elif one is not None:
            self._send(one, state)

    def _now(self) -> EngineState:
        supervisor, status = self._supervisor, self._supervisor.status
        folders = supervisor.folders
        if status == "ready" and any(front.joined not in (None, folders) for front in self._fronts.values()):
            # All are ready together: who has heard it from one finds it so at the next.
            first = "degraded" if supervisor.cores else "restarting"
            status = first if self._was_ready else "starting"
        self._was_ready |= status == "ready"
        opened = supervisor.opened
        return EngineState(
            status,
            supervisor.cause,
            supervisor.phase,
            self._was_ready,
            dict(supervisor.phases),
            None if opened is None else _model(opened),
            folders,
            list(supervisor.cores),
            supervisor.broken,
        )

    # ---- what fronts say

    def _send(self, front: FrontProcess, message: msgspec.Struct) -> None:
        # Done at once: there is no limit to what may wait, and what is for a front that is gone is dropped.
        self._socket.send_multipart([front.name.encode(), self._encode(message)])

    async def _receive(self) -> None:
        decode = msgspec.json.Decoder(ToController).decode
        while True:
            name, data = await self._socket.recv_multipart()
            front = self._fronts.get(name)
            if front is None:  # it has ended
                continue
            front.silence.heard()
            try:
                message = decode(data)
            except msgspec.MsgspecError as damage:
                _log.error("%s says what nobody can read: %s", front.name, damage)
                front.process.kill()
                continue
            match message:
                case Hello():
                    front.greeted = True
                    self._tell(front)
                case Joined(folders):
                    front.joined, self._ever_joined = folders, True
                    self._connections.look()
                    self._tell()
                case GiveBack(ticket):
                    front.give_back(ticket)
                case FrontAnswer() as found:
                    front.questions.answered(found)
                case FrontAsks(number, question):
                    self._answers.asked(front, number, question)


class _Overview:
    """Of all fronts."""

    def __init__(self, fronts: Fronts) -> None:
        self._fronts = fronts

    async def metrics(self, openmetrics: bool) -> tuple[bytes, str]:
        stats = await self._fronts.supervisor.stats()
        counted = [report.counted for report in await self._fronts.reports()]
        return self._fronts.metrics[0].render(stats, openmetrics, counted)

    async def in_flight(self) -> int:
        return sum(report.in_flight for report in await self._fronts.reports())

    async def abort(self, names: Sequence[str]) -> int:
        return await self._fronts.abort(names)


def _path(value: Any) -> str:
    if not isinstance(value, Path):
        raise NotImplementedError(type(value))
    return str(value)


def _model(opened: ResolvedModel) -> ServedModel:
    tokenizer = None if opened.tokenizer is None else opened.tokenizer.origin
    config = msgspec.to_builtins(opened.config)
    return ServedModel(config, tokenizer, opened.defaults, opened.name, opened.vectors)
