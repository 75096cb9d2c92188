"""Functions of a user's that every rank of an engine runs between two steps: `LLM.collective_rpc`.

A function is known by its name, which each rank imports, and what goes in and comes out is plain data: no code travels,
nothing is pickled, and it is the same wherever the ranks are.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from graphllm.config import ConfigError
from graphllm.host.importing import imported, name_of
from graphllm.runtime.commands.command import Answered, Device, Query
from graphllm.runtime.commands.worker import Worker

START_PROFILE, STOP_PROFILE = (f"graphllm.runtime.profiling:{name}_profile" for name in ("start", "stop"))
PROFILE_PREFIX = "profile/"


class RankCallError(RuntimeError):
    """A rank could not do what it was asked; the engine goes on."""


class Call(Query):
    """A function, module:name, that is given the rank's `Worker` first."""

    function: str
    args: list[Any]
    kwargs: dict[str, Any]

    def run(self, device: Device) -> Answered:
        device.synchronize()
        return answer(device.worker, self)


def call_of(method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """What `LLM.collective_rpc` is asked for. Raises ConfigError for a function that has no name elsewhere, and
    arguments that are no plain data."""
    name = method if isinstance(method, str) else name_of("collective_rpc", method)
    try:
        msgspec.msgpack.encode((args, kwargs))
    except TypeError as unknown:
        raise ConfigError(
            f"collective_rpc: an argument of {name} cannot be sent ({unknown}); give numbers, text, bytes, or lists or "
            "dictionaries of them"
        ) from unknown
    return Call(name, list(args), dict(kwargs))


def answer(worker: Worker, call: Call) -> Answered:
    """Run a function. A failure is in the answer; nothing is raised here."""
    try:
        value = imported("function", call.function)(worker, *call.args, **call.kwargs)
    except ConfigError as refused:
        return Answered(error=str(refused))
    except Exception as failure:
        traceback.print_exc()
        return Answered(error=f"{type(failure).__name__}: {failure}")
    try:
        return Answered(msgspec.msgpack.decode(msgspec.msgpack.encode(value)))
    except TypeError as unknown:
        return Answered(
            error=f"{call.function} returned {type(value).__name__}: {unknown}; return numbers, text, bytes, or lists "
            "or dictionaries of them"
        )


def values(answers: list[Answered]) -> list[Any]:
    """What all ranks have returned, in their order. Raises RankCallError when one could not."""
    failed = [f"rank {rank}: {a.error}" for rank, a in enumerate(answers) if a.error is not None]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise RankCallError(f"collective_rpc: {failed[0]}{more}")
    return [a.value for a in answers]
