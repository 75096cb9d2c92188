"""Commands: what an engine core has a device do to its states, as data.

A command is a struct; its `run` acts on one rank's executor. `Device` is the part of an executor that it may use.
`Executor.do` runs it in order with the steps; with several ranks, all of them run it. A command lies in the file of its
capability, also in a package from outside: on its way to other ranks it is named by module and class. A query is a
command that answers. Importing this imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from graphllm.host.importing import imported, name_of
from graphllm.runtime.commands.worker import Worker

if TYPE_CHECKING:
    import torch

    from graphllm.runtime.graphs import GraphPrograms
    from graphllm.runtime.memory.memory import Memory
    from graphllm.runtime.memory.states import States
    from graphllm.runtime.staged_stream import StagedStream
    from graphllm.weights.adapters.adapted import AdaptedLinear


class Device(Protocol):
    """What a command may use of a rank's executor.

    device: its ``type`` is "cpu" or "cuda".
    states, memory: the states, and the memory that they are in.
    stream: runs work in order.
    worker: the rank among all ranks of the engine.
    rank: among the ranks of the tensor-parallel group.
    adapters: the shape of one entry of each state of axis "adapter", by name.
    divided: by name, the linear layers that have their tables of adapters divided among the ranks.
    expert_slots: the experts that may move, see `graphllm.runtime.expert_slots`; None where none do.
    encoder: the graph that encodes items; None without one.
    snapshots: the graph that saves and loads snapshots of 8 bits; None without one.
    """

    device: Any
    states: States
    memory: Memory
    stream: StagedStream
    worker: Worker
    rank: int
    adapters: Mapping[str, tuple[int, ...]]
    divided: Mapping[str, AdaptedLinear]
    expert_slots: Any
    encoder: GraphPrograms | None
    snapshots: GraphPrograms | None

    def in_order(self, work: Callable[[], None]) -> None:
        """Launch work in order with the steps."""

    def synchronize(self) -> None:
        """Wait for everything so far."""


class Command(msgspec.Struct, tag=True, array_like=True):
    """Changes states on the device. Fields are plain data, numpy arrays and `TensorData`."""

    def check(self, device: Device) -> None:
        """Raise ConfigError, on rank 0, before any rank runs it."""

    def run(self, device: Device) -> Any:
        """Act on this rank, in order with the steps; returns at once."""
        raise NotImplementedError


class Answered(msgspec.Struct, tag=True):
    """What a query has found on one rank, or why it has not."""

    value: Any = None
    error: str | None = None


class Query(Command):
    """A command that answers: `run` gives `Answered`, once all steps before have ended."""

    def run(self, device: Device) -> Answered:
        """What this rank has."""
        raise NotImplementedError


class Sent(msgspec.Struct, tag=True, array_like=True):
    """A command on its way to other ranks.

    kind: module:class.
    fields: as msgpack.
    """

    kind: str
    fields: bytes

    @staticmethod
    def of(command: Command) -> Sent:
        return Sent(name_of("command", type(command)), _encoder.encode(command))

    def command(self) -> Command:
        """The command again. Arrays in it are for reading only."""
        decode = _decoder(self.kind).decode
        found: Command = decode(self.fields)
        return found


class TensorData:
    """A tensor in the host's memory, as a field of a command."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def shares_of(contents: Sequence[bytes], sizes: Sequence[int], rank: int) -> list[bytes]:
    """The part of one rank in contents that hold the parts of all ranks one after another. sizes: bytes of each."""
    start = sum(sizes[:rank])
    return [content[start : start + sizes[rank]] for content in contents]


def joined(answers: Sequence[Answered]) -> list[bytes]:
    """Contents with the parts of all ranks; each answer has one rank's part."""
    return [b"".join(parts) for parts in zip(*(answer.value for answer in answers), strict=True)]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, TensorData):
        import torch

        tensor = value.tensor
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data
    raise NotImplementedError(f"{type(value).__name__} cannot be a field of a command")


def _from_plain(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    if kind is np.ndarray:
        return np.frombuffer(data, dtype).reshape(shape)
    if kind is TensorData:
        import torch

        return TensorData(torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape))
    raise NotImplementedError(f"{kind.__name__} cannot be a field of a command")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


@functools.cache
def _decoder(kind: str) -> msgspec.msgpack.Decoder[Any]:
    found = imported("command", kind)
    if not (isinstance(found, type) and issubclass(found, Command)):
        raise TypeError(f"{kind} is no command")
    return msgspec.msgpack.Decoder(found, dec_hook=_from_plain)
