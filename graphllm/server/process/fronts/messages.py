"""What the controller and its fronts say to each other: msgspec structs in JSON over ZMQ, in a folder that only this
user may enter. Both ask questions; each answer bears the number of its question.

JSON, because it has integers of any size, and what it carries came as JSON or goes as JSON. Connections come by a
socket of their own, on which a front says how many it has (`CONNECTIONS`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from graphllm.config.requests.pooling_params import Vectors
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.process.core_client import Health
from graphllm.server.process.options import ServerOptions
from graphllm.server.service.adapters import ServedAdapter
from graphllm.server.service.stored_responses import StoredResponse
from graphllm.server.supervision.engine_view import CoreStatus, SupervisorOptions
from graphllm.server.supervision.metrics import Counted

# How many connections a front has taken so far, and how many of them are open. Only the latest one counts.
CONNECTIONS = struct.Struct("=QQ")


class FrontLaunch(msgspec.Struct):
    """What a front reads from stdin. name: of it; no front before it had the same. number: the same, as a number.
    folder: of the controller's socket. doorway: file descriptor of the socket by which connections come."""

    name: str
    number: int
    folder: str
    doorway: int
    options: ServerOptions
    engine: SupervisorOptions


class ServedModel(msgspec.Struct):
    """An opened model. config: a CoreConfig as plain JSON. tokenizer: of what `Tokenizer.from_folder` makes it, None
    without one. defaults: sampling parameters of requests that name none. vectors: what they are, of a model that
    gives some."""

    config: dict[str, Any]
    tokenizer: tuple[str, Mapping[str, Any], Mapping[str, Any]] | None
    defaults: SamplingParams
    name: str
    vectors: Vectors


class EngineState(msgspec.Struct, tag=True):
    """How the engine does. folders: of the sockets of each core of a loaded one, "" for one of several that is not
    ready; none while there is no engine. health: of one that has failed its requests. The others: as in
    `EngineView`."""

    status: str
    cause: str | None
    phase: str
    was_ready: bool
    phases: dict[str, float]
    model: ServedModel | None
    folders: list[str]
    cores: list[CoreStatus]
    health: Health | None


class End(msgspec.Struct, tag=True):
    """To a front: the server is closed; leave."""


class Hello(msgspec.Struct, tag=True):
    """A front is there; the controller sends it the state at once."""


class Joined(msgspec.Struct, tag=True):
    """A front takes connections. folders: of the cores that it is connected to."""

    folders: list[str]


class GiveBack(msgspec.Struct, tag=True):
    """The room of that ticket is free, or no longer waited for."""

    ticket: int


# ---- questions of fronts


class TakeRoom(msgspec.Struct, tag=True):
    """Answered with null once there is so much."""

    room: Literal["bodies", "values"]
    ticket: int
    size: int


class TakeTurn(msgspec.Struct, tag=True):
    """Answered with the seconds to wait, 0 for none."""

    caller: str


class PutResponse(msgspec.Struct, tag=True):
    id: str
    record: StoredResponse


class GetResponse(msgspec.Struct, tag=True):
    """Answered with the StoredResponse, or null."""

    id: str


class RemoveResponse(msgspec.Struct, tag=True):
    id: str


class ListAdapters(msgspec.Struct, tag=True):
    """Answered with the ServedAdapters."""


class FindAdapter(msgspec.Struct, tag=True):
    """Answered with the ServedAdapter, or null."""

    name: str


class PutAdapter(msgspec.Struct, tag=True):
    adapter: ServedAdapter


class RemoveAdapter(msgspec.Struct, tag=True):
    """Answered with whether it was there."""

    name: str


class ReadMetrics(msgspec.Struct, tag=True):
    """Answered with text and content type."""

    openmetrics: bool


class CountInFlight(msgspec.Struct, tag=True):
    """Answered with a number."""


# ---- questions of both


class EndResponse(msgspec.Struct, tag=True):
    """Answered with null once what writes the response has ended."""

    id: str


class AbortRequests(msgspec.Struct, tag=True):
    """Answered with how many."""

    names: list[str]


# ---- questions of the controller


class GetReport(msgspec.Struct, tag=True):
    """Answered with a Report."""


class Report(msgspec.Struct):
    """What a front has counted, its requests in the engine, its HTTP requests."""

    counted: Counted
    running: int
    in_flight: int


class FrontAnswer(msgspec.Struct, tag=True):
    """value: JSON. wrong: why there is none; a defect of this program."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    wrong: str = ""


OfFront = (
    TakeRoom
    | TakeTurn
    | PutResponse
    | GetResponse
    | RemoveResponse
    | ListAdapters
    | FindAdapter
    | PutAdapter
    | RemoveAdapter
    | ReadMetrics
    | CountInFlight
    | EndResponse
    | AbortRequests
)
OfController = EndResponse | AbortRequests | GetReport


class FrontAsks(msgspec.Struct, tag=True):
    number: int
    question: OfFront


class ControllerAsks(msgspec.Struct, tag=True):
    number: int
    question: OfController


ToController = Hello | Joined | GiveBack | FrontAsks | FrontAnswer
ToFront = EngineState | End | ControllerAsks | FrontAnswer


def address(folder: str) -> str:
    """Of the controller's socket."""
    return f"ipc://{folder}/control"
