"""The engine core in its own process: the child's loop, `run_core`. The front's side is `graphllm.engine.client`.

Sockets are Unix sockets in a folder that only this user may enter. The child reads its settings as one line of JSON
from stdin and lives for as long as that pipe does.
"""

from __future__ import annotations

import contextlib
import os
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
from graphllm.engine.messages import (
    Abort,
    Add,
    BadMessage,
    Dead,
    DeathCause,
    GetStats,
    Heartbeat,
    Launch,
    Ready,
    Rejected,
    Reply,
    ResetPrefixCache,
    Shutdown,
    ToCore,
    Updates,
)
from graphllm.engine.request import Core, EngineRequest, QueueFullError

_ORPHAN_GRACE = 5.0  # seconds that the child's orderly end may take once the front is gone


Load = Callable[[dict[str, Any], Callable[[str, float], None]], Core]


class _Terminated(BaseException):
    """SIGTERM came while no step was running. Not an Exception, so that loading cannot swallow it."""


class _Progress:
    """What the loop is at: written by it, read by the heartbeat thread and the signal handler."""

    def __init__(self) -> None:
        self.activity: Literal["loading", "idle", "step", "closing"] = "loading"
        self.since = time.monotonic()  # when the last step ended or, if later, work began or a kernel was seen to end
        self.steps = self.unfinished = self._kernels = 0
        self.core: Core | None = None  # once there is one
        self.terminate = False

    def on_sigterm(self, *_: object) -> None:
        """A step is let finish; waiting and loading are not."""
        if self.activity in ("loading", "idle"):
            self.activity = "closing"
            raise _Terminated
        self.terminate = True

    def beat(self) -> Heartbeat:
        now = time.monotonic()
        if self.core is not None and (kernels := self.core.kernels_done) != self._kernels:
            self.since, self._kernels = now, kernels
        quiet = 0.0 if self.activity == "idle" else now - self.since
        return Heartbeat(now, self.steps, self.unfinished, quiet, self.activity)


class _Loop:
    """Feeds a core from its inbox and sends its updates, until Shutdown or SIGTERM; raises what the core raises."""

    def __init__(
        self, core: Core, inbox: zmq.Socket[bytes], send: Callable[[msgspec.Struct], None], progress: _Progress
    ) -> None:
        self._core, self._inbox, self._send, self._progress = core, inbox, send, progress
        self._decode = msgspec.msgpack.Decoder(ToCore).decode
        self.live: dict[str, None] = {}  # unfinished ids, oldest first
        self._shutdown: Shutdown | None = None
        self._aborted = False  # the update of an abort comes with the next step, even when nothing else is left

    def run(self) -> None:
        progress = self._progress
        while not self._over():
            if not self._busy():
                progress.activity, progress.unfinished = "idle", 0
                if progress.terminate:  # SIGTERM before the line above; from there on it raises
                    return
                self._handle(self._inbox.recv())
            while self._inbox.poll(0):
                self._handle(self._inbox.recv())
            if self._busy() and not self._over():
                self._step()

    def _busy(self) -> bool:
        return self._core.unfinished > 0 or self._aborted

    def _over(self) -> bool:
        asked = self._shutdown
        return self._progress.terminate or (asked is not None and not (asked.drain and self._busy()))

    def _step(self) -> None:
        progress = self._progress
        if progress.activity == "idle":
            progress.since, progress.activity = time.monotonic(), "step"
        progress.unfinished = self._core.unfinished
        self._aborted = False
        updates = self._core.step()
        progress.since = time.monotonic()
        progress.steps += 1
        if updates:
            for update in updates:
                if update.finish_reason is not None:
                    self.live.pop(update.id, None)
            self._send(Updates(updates))

    def _handle(self, data: bytes) -> None:
        try:
            message = self._decode(data)
        except msgspec.MsgspecError as e:
            self._send(BadMessage(f"{len(data)} bytes: {e}"))
            return
        match message:
            case Add(requests):
                self._add(requests)
            case Abort(ids):
                self._core.abort(ids)
                self._aborted = True
            case ResetPrefixCache(call):
                self._send(Reply(call, reset=self._core.reset_prefix_cache()))
            case GetStats(call):
                self._send(Reply(call, stats=self._core.stats()))
            case Shutdown():
                self._shutdown = message

    def _add(self, requests: list[EngineRequest]) -> None:
        ids = [r.id for r in requests]
        if self._shutdown is not None:
            self._send(Rejected(ids, "the engine is shutting down", "closing"))
            return
        for at, request in enumerate(requests):
            try:
                self._core.add(request)
            except ConfigError as e:
                self._core.abort(ids[:at])
                self._aborted = at > 0
                for id in ids[:at]:
                    del self.live[id]
                self._send(Rejected(ids, str(e), "queue_full" if isinstance(e, QueueFullError) else "invalid"))
                return
            self.live[request.id] = None


def run_core(load: Load, preload: Callable[[], None] = lambda: None) -> None:
    """The child's whole life: read the settings from stdin, load the core, serve it; exits with 1 after a failure.

    load: makes the core from the settings, and tells the name and seconds of each phase. preload: imports what that
    needs, before there are settings.
    """
    begun = time.monotonic()
    preload()
    preloaded = time.monotonic()
    line = _read_line(0)
    if not line:  # the front has ended without a model
        sys.exit(0)
    launch = msgspec.json.decode(line, type=Launch)
    progress = _Progress()
    phases = {
        "process": begun - launch.started,
        "import torch": preloaded - begun,
        "wait for the model": time.monotonic() - preloaded,
    }
    signal.signal(signal.SIGTERM, progress.on_sigterm)
    context = zmq.Context(io_threads=1)
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(launch.address("core"))
    outbox.connect(launch.address("front"))
    encode = msgspec.msgpack.Encoder().encode
    done = threading.Event()
    heart = threading.Thread(target=_beat, args=(context, launch, progress, done), daemon=True)
    heart.start()
    threading.Thread(target=_end_with_parent, args=(launch.folder,), daemon=True).start()

    def send(message: msgspec.Struct) -> None:
        outbox.send(encode(message))

    core: Core | None = None
    loop: _Loop | None = None
    cause: DeathCause | None = None
    try:
        core = load(launch.settings, lambda name, seconds: phases.update({name: phases.get(name, 0.0) + seconds}))
        send(Ready(core.info, phases))
        loop = _Loop(core, inbox, send, progress)
        progress.core, progress.activity = core, "idle"
        loop.run()
    except _Terminated:
        progress.terminate = True
    except Exception as e:
        kind: Literal["config", "exception"] = "config" if loop is None and isinstance(e, ConfigError) else "exception"
        message = str(e) if kind == "config" else f"{type(e).__name__}: {e}"
        live = list(loop.live) if loop else []
        cause = DeathCause(
            kind=kind, message=message, traceback=traceback.format_exc(), steps=progress.steps, running=live
        )
    failed = cause is not None
    progress.activity = "closing"
    if progress.terminate:
        live = list(loop.live) if loop else []
        cause = DeathCause(kind="terminated", message="ended by SIGTERM", steps=progress.steps, running=live)
    if cause is not None:
        send(Dead(cause))
    if core is not None and not failed:
        core.close()
    done.set()
    heart.join()
    context.destroy(linger=1000)  # milliseconds to write what was sent
    sys.exit(int(failed))


def _read_line(fd: int) -> bytes:
    """Unbuffered: another thread reads on from here, and a lock on stdin would break the interpreter's shutdown."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1 << 16)
        if not piece:
            sys.exit("graphllm.engine.process: no settings on stdin; it is started by CoreClient, not by hand")
        line += piece
    return line


def _beat(context: zmq.Context[Any], launch: Launch, progress: _Progress, done: threading.Event) -> None:
    """Heartbeats, on a socket of this thread's own. They tell liveness (they come) and progress (what they say)."""
    with context.socket(zmq.PUSH) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 4)
        socket.connect(launch.address("front"))
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
