"""The engine core in its own process: the child's loop, `run_core`. The fronts' side is
`graphllm.engine.process.core_link`.

Sockets are Unix sockets in a folder that only this user may enter. The child reads its settings as one line of JSON
from stdin and lives for as long as that pipe does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import zmq

from graphllm.config import ConfigError
from graphllm.engine.process import messages
from graphllm.engine.process.sleep_orders import Orders
from graphllm.engine.requests.request import Core, EngineCoreOutput, EngineRequest, QueueFullError
from graphllm.host.silence import Silence, threads_of
from graphllm.runtime.commands.calls import RankCallError

_ORPHAN_GRACE = 5.0  # seconds that the child's orderly end may take once the front is gone
_CHECKED = 500  # milliseconds between looks at the health of a core that has nothing to do
_CONNECTING = 1.0  # seconds that a front may take to connect its socket for answers
_LOADS = 0.05  # seconds between two words on the load


MakeCore = Callable[[dict[str, Any], Callable[[str, float], None]], Core]


class _Terminated(BaseException):
    """SIGTERM came while no step was running. Not an Exception, so that loading cannot swallow it."""


class _Progress:
    """What the loop is at: written by it, read by the heartbeat thread and the signal handler. heartbeat: seconds
    between two of that thread's looks."""

    def __init__(self, heartbeat: float) -> None:
        self.activity: Literal["loading", "idle", "step", "closing"] = "loading"
        self.since = time.monotonic()  # when the last step ended or, if later, work began
        self.steps = self.unfinished = 0
        self._seen = (0.0, 0)  # `since` and the kernels done, at the last look
        self._quiet = Silence(lambda: threads_of(os.getpid(), family=True), heartbeat)  # the ranks are its children
        self.core: Core | None = None  # once there is one
        self.terminate = False

    def on_sigterm(self, *_: object) -> None:
        """A step is let finish; waiting and loading are not."""
        if self.activity in ("loading", "idle"):
            self.activity = "closing"
            raise _Terminated
        self.terminate = True

    def beat(self) -> messages.Heartbeat:
        seen = (self.since, 0 if self.core is None else self.core.kernels_done)
        if self.activity == "idle" or seen != self._seen:
            self._quiet.heard()
        self._seen = seen
        return messages.Heartbeat(time.monotonic(), self.steps, self.unfinished, self._quiet.look(), self.activity)


class _Answers:
    """The way to the fronts, by name."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        socket.set(zmq.ROUTER_MANDATORY, 1)  # else what is sent to a front that is gone is dropped in silence
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a name may come again before the end of its old connection was seen
        socket.set(zmq.SNDHWM, 0)
        self._socket, self._encode = socket, msgspec.msgpack.Encoder().encode

    def send(self, front: bytes, message: msgspec.Struct) -> bool:
        """False when no front has this name any more."""
        try:
            self._socket.send_multipart([front, self._encode(message)])
        except zmq.ZMQError as problem:
            if problem.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def send_first(self, front: bytes, message: msgspec.Struct) -> bool:
        """Send to one that may not be connected yet."""
        deadline = time.monotonic() + _CONNECTING
        while not (sent := self.send(front, message)) and time.monotonic() < deadline:
            time.sleep(0.002)
        return sent


class _Loop:
    """Feeds a core with requests and sends its updates, until Shutdown or SIGTERM; raises what the core raises. ready:
    the answer to fronts that come."""

    def __init__(
        self, core: Core, requests: zmq.Socket[bytes], answers: _Answers, ready: messages.Ready, progress: _Progress
    ) -> None:
        self._core, self._requests, self._answers, self._ready = core, requests, answers, ready
        self._progress = progress
        self._poller = zmq.Poller()
        self._poller.register(requests, zmq.POLLIN)
        if core.wakeup_fd is not None:
            self._poller.register(core.wakeup_fd, zmq.POLLIN)
        self._decode = msgspec.msgpack.Decoder(messages.ToCore).decode
        self.live: dict[str, bytes] = {}  # unfinished ids, oldest first, and their fronts
        self._watching: set[bytes] = set()  # fronts that want to know the load
        self._sent, self._load = 0.0, messages.CoreLoad(0)  # the time of the last report, and the load in it
        self._sleep = Orders(core, self._tell_slept)
        self._shutdown: messages.Shutdown | None = None
        self._cold = True  # as far as is known, something is slow the first time
        self._aborted = False  # the update of an abort comes with the next step, even when nothing else is left

    def run(self) -> None:
        progress = self._progress
        while not self._over():
            if not self._busy():
                self._send_load()
                self._warm_up()
                progress.activity, progress.unfinished = "idle", 0
                if progress.terminate:  # SIGTERM before the line above; from there on it raises
                    return
                while not self._poller.poll(_CHECKED):
                    self._core.check_health()
                self._core.hear()
            while self._requests.poll(0):
                self._handle(*self._requests.recv_multipart())
            if self._busy() and not self._over():
                self._step()
                if self._sleep.open:
                    progress.activity = "idle"  # as long as it takes, it is no step that is stuck
                    self._sleep.look()

    def _warm_up(self) -> None:
        """Warm up as long as nothing comes. Such a step is finished, like steps of requests."""
        while self._cold and not (self._sleep.paused or self._progress.terminate or self._poller.poll(0)):
            self._progress.since, self._progress.activity = time.monotonic(), "step"
            self._cold = self._core.warm_up()

    def _busy(self) -> bool:
        return self._core.unfinished > 0 or self._aborted

    def _over(self) -> bool:
        asked = self._shutdown
        # What waits in a core that sleeps does not end.
        drains = asked is not None and asked.drain and self._busy() and not self._sleep.paused
        return self._progress.terminate or (asked is not None and not drains)

    def _step(self) -> None:
        progress = self._progress
        if progress.activity == "idle":
            progress.since, progress.activity = time.monotonic(), "step"
        progress.unfinished = self._core.unfinished
        self._aborted = False
        updates = self._core.step()
        progress.since = time.monotonic()
        progress.steps += 1
        shares: dict[bytes, list[EngineCoreOutput]] = {}
        for update in updates:
            id = update.id
            front = self.live[id] if update.finish_reason is None else self.live.pop(id)
            shares.setdefault(front, []).append(update)
        for front, share in shares.items():
            if not self._answers.send(front, messages.Updates(share)):
                self._abort([id for id, owner in self.live.items() if owner == front])
        if progress.since - self._sent > _LOADS:
            self._send_load()

    def _send_load(self) -> None:
        load = messages.CoreLoad(len(self.live))
        if self._watching and load != self._load:
            self._sent, self._load = time.monotonic(), load
            self._watching = {front for front in self._watching if self._answers.send(front, load)}

    def _abort(self, ids: list[str]) -> None:
        if ids:
            self._core.abort(ids)
            self._aborted = True

    def _handle(self, front: bytes, data: bytes) -> None:
        try:
            message = self._decode(data)
        except msgspec.MsgspecError as e:
            self._answers.send(front, messages.BadMessage(f"{len(data)} bytes: {e}"))
            return
        match message:
            case messages.Hello(loads):
                self._answers.send_first(front, self._ready)
                if loads:
                    self._watching.add(front)
            case messages.Add(requests):
                self._add(front, requests)
            case messages.Abort(ids):
                self._abort(ids)
            case messages.ResetPrefixCache(call):
                self._answers.send(front, messages.CoreReply(call, reset=self._core.reset_prefix_cache()))
            case messages.GetStats(call):
                self._answers.send(front, messages.CoreReply(call, stats=self._core.stats()))
            case messages.CallRanks(call, what, timeout):
                try:
                    reply = messages.CoreReply(call, values=self._core.collective_rpc(what, timeout))
                except RankCallError as failure:
                    reply = messages.CoreReply(call, error=str(failure))
                self._answers.send(front, reply)
            case messages.SleepOrder():
                self._progress.activity = "idle"
                self._sleep.take(front, message)
            case messages.Shutdown():
                self._shutdown = message

    def _tell_slept(self, front: bytes, order: messages.SleepOrder, state: messages.SleepState) -> None:
        self._answers.send(front, messages.CoreReply(order.call, sleep=state))

    def _add(self, front: bytes, requests: list[EngineRequest]) -> None:
        ids = [r.id for r in requests]
        if self._shutdown is not None:
            self._answers.send(front, messages.Rejected(ids, "the engine is shutting down", "closing"))
            return
        for at, request in enumerate(requests):
            try:
                self._core.add(request)
            except ConfigError as e:
                self._abort(ids[:at])
                kind: Literal["queue_full", "invalid"] = "queue_full" if isinstance(e, QueueFullError) else "invalid"
                self._answers.send(front, messages.Rejected(ids, str(e), kind))
                return
            self.live[request.id] = front


def run_core(
    load: MakeCore,
    preload: Callable[[], None] = lambda: None,
    begin: Callable[[dict[str, Any]], None] = lambda settings: None,
) -> None:
    """The child's whole life: read the settings from stdin, load the core, serve it; exits with 1 after a failure.

    load: makes the core from the settings, and reports the name and seconds of each phase.
    preload: imports what ``load`` needs, before the settings come.
    begin: called in a thread with the settings as soon as they come; `preload` may still be running.
    """
    begun = time.monotonic()
    given: queue.SimpleQueue[messages.Launch | None] = queue.SimpleQueue()
    threading.Thread(target=_read_settings, args=(given, begin), daemon=True).start()
    preload()
    preloaded = time.monotonic()
    if (launch := given.get()) is None:
        sys.exit("graphllm.engine.process.core_loop: no settings on stdin; it is started by CoreClient, not by hand")
    progress = _Progress(launch.heartbeat)
    phases = {
        "process": begun - launch.started,
        "import torch" if "torch" in sys.modules else "imports": preloaded - begun,
        "wait for the model": time.monotonic() - preloaded,
    }
    signal.signal(signal.SIGTERM, progress.on_sigterm)
    context = zmq.Context(io_threads=1)
    requests, router = context.socket(zmq.PULL), context.socket(zmq.ROUTER)
    requests.bind(messages.address(launch.folder, "requests"))
    router.bind(messages.address(launch.folder, "answers"))
    answers = _Answers(router)
    done = threading.Event()
    heart = threading.Thread(target=_beat, args=(context, launch, progress, done), daemon=True)
    heart.start()
    threading.Thread(target=_end_with_parent, args=(launch.folder,), daemon=True).start()

    core: Core | None = None
    loop: _Loop | None = None
    cause: messages.DeathCause | None = None
    try:
        core = load(launch.settings, lambda name, seconds: phases.update({name: phases.get(name, 0.0) + seconds}))
        loop = _Loop(core, requests, answers, messages.Ready(core.info, phases), progress)
        progress.core, progress.activity = core, "idle"
        loop.run()
    except _Terminated:
        progress.terminate = True
    except Exception as e:
        kind: Literal["config", "exception"] = "config" if loop is None and isinstance(e, ConfigError) else "exception"
        message = str(e) if kind == "config" else f"{type(e).__name__}: {e}"
        live = list(loop.live) if loop else []
        cause = messages.DeathCause(
            kind=kind, message=message, traceback=traceback.format_exc(), steps=progress.steps, running=live
        )
    failed = cause is not None
    progress.activity = "closing"
    if progress.terminate:
        live = list(loop.live) if loop else []
        cause = messages.DeathCause(kind="terminated", message="ended by SIGTERM", steps=progress.steps, running=live)
    if cause is not None:
        answers.send_first(launch.front.encode(), messages.Dead(cause))
    if core is not None and not failed:
        core.close()
    done.set()
    heart.join()
    context.destroy(linger=1000)  # milliseconds to write what was sent
    if failed:  # it may have threads that wait for ever, for a rank that is gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(0)


def _read_settings(given: queue.SimpleQueue[messages.Launch | None], begin: Callable[[dict[str, Any]], None]) -> None:
    """From stdin; None where it ends without them. Unbuffered: another thread reads on from here, and a lock on stdin
    would break the interpreter's shutdown."""
    line, launch = b"", None
    try:
        while not line.endswith(b"\n"):
            piece = os.read(0, 1 << 16)
            if not piece:
                return
            line += piece
        launch = msgspec.json.decode(line, type=messages.Launch)
        begin(launch.settings)
    finally:
        given.put(launch)


def _beat(context: zmq.Context[Any], launch: messages.Launch, progress: _Progress, done: threading.Event) -> None:
    """Heartbeats, on a socket of this thread's own. They tell liveness (they come) and progress (what they say)."""
    with context.socket(zmq.PUSH) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 4)
        socket.connect(messages.address(launch.folder, "heartbeats"))
        while True:
            with contextlib.suppress(zmq.Again):  # the front does not read now; it wants none of the old ones later
                socket.send(msgspec.msgpack.encode(progress.beat()), zmq.NOBLOCK)
            if done.wait(launch.heartbeat):
                return


def _end_with_parent(folder: str) -> None:
    """End this process when stdin ends: in good order if the main thread listens to SIGTERM, then anyhow."""
    while os.read(0, 1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE)
    os._exit(1)
