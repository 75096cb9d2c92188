"""Functions of a user's that every rank of an engine runs between two steps: `LLM.collective_rpc`.

A function is known by its name, which each rank imports, and what goes in and comes out is plain data: no code travels,
nothing is pickled, and it is the same wherever the ranks are.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from graphllm.config import ConfigError
from graphllm.host.importing import imported, name_of
from graphllm.runtime.rank_messages import Answered, Call

if TYPE_CHECKING:
    import torch

    from graphllm.weights.loading.host_array import HostArray


START_PROFILE, STOP_PROFILE = (f"graphllm.runtime.profiling:{name}_profile" for name in ("start", "stop"))
PROFILE_PREFIX = "profile/"


class RankCallError(RuntimeError):
    """A rank could not do what it was asked; the engine goes on."""


@dataclass
class Worker:
    """The first argument of such a function: the rank that runs it, of ``world_size``. device: "cpu", or "cuda:1".
    in_order: runs something where kernels are launched from, on a CPU another thread, and waits for it. kept: for
    functions, which find there what they have put there before."""

    rank: int
    world_size: int
    device: str
    parameters: Mapping[str, torch.Tensor | HostArray]
    in_order: Callable[[Callable[[], Any]], Any]
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters, by the names that the model's file gives them, in the memory that kernels read. They
        may be written, with numbers of the same shape and dtype."""
        import torch  # an engine may run without

        return {
            name: weight
            if isinstance(weight, torch.Tensor)
            else torch.from_numpy(weight.numbers).view(getattr(torch, weight.dtype))
            for name, weight in self.parameters.items()
        }


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
    """Run a function. Whatever goes wrong is told, and raised by nobody here."""
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
