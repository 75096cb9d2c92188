"""Process groups by name: what collective ops of a graph run in. A process joins them at its start
(`graphllm.runtime.groups`); without, every group has this process alone."""

from __future__ import annotations

import threading
from typing import Protocol

from torch import Tensor

TENSOR = "tensor"  # the ranks that hold one model together
EXPERTS = "experts"  # the engine cores that have the experts of a layer together, each with all else
SYMMETRIC_BYTES = 64 << 20  # of a GPU's memory, which the others of its group read: `runtime.symmetric_memory`


class Group(Protocol):
    """Processes that compute together, each with its number ``rank`` of ``size``. All of them make the same calls in
    the same order. On a GPU a call works on the current stream, without waiting for it, and may be captured."""

    rank: int
    size: int
    exchange: Tensor | None  # for kernels that give the other ranks numbers themselves: see `graphllm.ir.exchange`

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        """out: the sum of all ranks' x, of its shape, bitwise the same on each of them. Both are contiguous."""

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        """out [.., m]: the first m entries of all ranks' x [.., n] in their order. work [size, .., n] may be written.
        All are contiguous."""

    def gather_rows(self, x: Tensor, out: Tensor) -> None:
        """out [size * T, ..]: all ranks' x [T, ..] in their order. Both are contiguous."""

    def sum_rows(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        """out [T, ..]: this rank's rows of the sum of all ranks' x [size * T, ..]. work, as x, may be written."""

    def send(self, x: Tensor, to: int) -> None:
        """Give x, any view, to the rank ``to``."""

    def receive(self, out: Tensor, origin: int) -> None:
        """out, any view: what the rank ``origin`` sends."""

    def broadcast(self, x: Tensor, origin: int) -> None:
        """x, any view: what the rank ``origin`` has in it."""


class Alone:
    """The group of one process."""

    rank, size = 0, 1
    exchange: Tensor | None = None

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        out.copy_(x[..., : out.shape[-1]])

    def gather_rows(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def sum_rows(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def send(self, x: Tensor, to: int) -> None:
        raise RuntimeError(f"there is no rank {to} to send to")

    def receive(self, out: Tensor, origin: int) -> None:
        raise RuntimeError(f"there is no rank {origin} to receive from")

    def broadcast(self, x: Tensor, origin: int) -> None:
        pass


BESIDE = ".beside"  # behind a group's name: the same processes, for a thread whose calls come in no order with others'
_groups: dict[str, Group] = {}
_thread = threading.local()


def set_group(name: str, group: Group | None) -> None:
    """Make a group known; None forgets it."""
    if group is None:
        _groups.pop(name, None)
    else:
        _groups[name] = group


def joined_group(name: str) -> Group | None:
    """The group of that name, if this process has joined one."""
    return _groups.get(name)


def go_beside() -> None:
    """Have this thread use groups of its own from now on, where there are some: all ranks make the same calls in the
    same order in each thread, and in no order between two threads."""
    _thread.beside = True


def group_of(name: str, ranks: int) -> Group:
    """The group of that name. Raises RuntimeError where it has not so many ranks: a graph is made for a number of
    them, and the parts of another would not make the whole."""
    group = _groups.get(name, Alone())
    if getattr(_thread, "beside", False):
        group = _groups.get(name + BESIDE, group)
    if group.size != ranks:
        raise RuntimeError(f"compiled for {ranks} ranks of the group {name!r}, this process is in one of {group.size}")
    return group
