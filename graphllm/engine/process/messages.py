"""What the engine core's process and its fronts say to each other: msgspec structs in MessagePack over ZMQ.

A front sends two frames, its name and the message; the core answers to that name. The first front has started the
process, and only this front gets its heartbeats and its death.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from graphllm.engine.process.sleep_orders import SleepOrder, SleepState
from graphllm.engine.requests.request import CoreInfo, CoreStats, EngineCoreOutput, EngineRequest
from graphllm.runtime.commands.calls import Call


class DeathCause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a core is gone.

    kind: "exception" (in the core), "config" (settings it cannot load), "signal" (it was killed), "exit" (it ended by
    itself), "terminated" (SIGTERM), "protocol" (it said something unreadable), "closed" (its client was closed).
    message: for people.
    steps: completed ones.
    running: ids of unfinished requests, as far as known.
    """

    kind: Literal["exception", "config", "signal", "exit", "terminated", "protocol", "closed"]
    message: str
    traceback: str = ""
    steps: int = 0
    running: list[str] = []


class EngineDeadError(RuntimeError):
    """The engine core is gone; ``cause`` says why."""

    def __init__(self, cause: DeathCause) -> None:
        super().__init__(f"the engine core is dead: {cause.message}")
        self.cause = cause


# ---- front to core


class Hello(msgspec.Struct, tag=True):
    """A front is there; the answer is Ready. loads: tell it of the load by all fronts."""

    loads: bool = False


class Add(msgspec.Struct, tag=True):
    """The siblings of one user's request: all of them are queued, or none."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag=True):
    ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True):
    call: int


class GetStats(msgspec.Struct, tag=True):
    call: int


class CallRanks(msgspec.Struct, tag=True):
    """`EngineCore.collective_rpc`."""

    call: int
    what: Call
    timeout: float | None


class Shutdown(msgspec.Struct, tag=True):
    """drain: finish the requests there are; new ones are rejected."""

    drain: bool


# ---- core to front


class Ready(msgspec.Struct, tag=True):
    """phases: seconds of each start-up phase."""

    info: CoreInfo
    phases: dict[str, float]


class Updates(msgspec.Struct, tag=True):
    """News of one step."""

    updates: list[EngineCoreOutput]


class Rejected(msgspec.Struct, tag=True):
    """None of ``ids``, the siblings of one Add, will run."""

    ids: list[str]
    message: str
    kind: Literal["invalid", "queue_full", "closing"]


class CoreLoad(msgspec.Struct, tag=True):
    """Sequences of all fronts together, as of now."""

    sequences: int


class CoreReply(msgspec.Struct, tag=True):
    """The answer to ResetPrefixCache (reset), GetStats (stats), SleepOrder (sleep), or CallRanks (values, or the
    error)."""

    call: int
    reset: bool = False
    stats: CoreStats | None = None
    values: list[Any] = []
    error: str | None = None
    sleep: SleepState | None = None


class BadMessage(msgspec.Struct, tag=True):
    """The core was sent something unreadable, and ignored it."""

    message: str


class Heartbeat(msgspec.Struct, tag=True):
    """A sign of life.

    at: seconds, `time.monotonic`.
    quiet: seconds in which the core could run since the last step or kernel ended, while there is work; else 0.
    """

    at: float
    steps: int
    unfinished: int
    quiet: float
    activity: Literal["loading", "idle", "step", "closing"]


class Dead(msgspec.Struct, tag=True):
    cause: DeathCause


ToCore = Hello | Add | Abort | ResetPrefixCache | GetStats | CallRanks | SleepOrder | Shutdown
FromCore = Ready | Updates | Rejected | CoreLoad | CoreReply | BadMessage | Heartbeat | Dead


class Launch(msgspec.Struct):
    """What the child reads from stdin.

    folder: of the sockets.
    front: name of the first one.
    started: `time.monotonic` of the launch.
    """

    settings: dict[str, Any]
    folder: str
    front: str
    heartbeat: float
    started: float


def address(folder: str, socket: Literal["requests", "answers", "heartbeats"]) -> str:
    """Of a socket in the folder of a core. The core binds the first two, the first front the third."""
    return f"ipc://{folder}/{socket}"
