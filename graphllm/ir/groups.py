"""Process groups by name: what collective ops of a graph run in. A process joins them at its start
(`graphllm.runtime.ranks.groups`); without, every group has only this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

TENSOR = "tensor"  # the ranks that hold one model together
EXPERTS = "experts"  # the engine cores that have the experts of a layer together, each with all else
SYMMETRIC_BYTES = 64 << 20  # of a GPU's memory, which the others of its group read: `runtime.ranks.symmetric_memory`


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

    def broadcast(self, x: Tensor, origin: int) -> None:
        """x, any view: what the rank ``origin`` has in it."""

    def let_go(self) -> None:
        """Give whatever kernel of this device waits for another rank any numbers in the place of those, so that it goes
        on. After one of the ranks is gone; what follows waits again."""


class OneProcess:
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

    def broadcast(self, x: Tensor, origin: int) -> None:
        pass

    def let_go(self) -> None:
        pass


class Links(Protocol):
    """Messages between the stages of a model, this process is number ``stage`` of ``count``. What goes
    from one stage to another arrives in the order in which it was sent. On a GPU a call works on the current stream,
    without waiting for it; it may not be captured."""

    stage: int
    count: int

    def send(self, values: Sequence[Tensor], to: Sequence[int]) -> None:
        """Give values, any views, to stages. Nobody waits until they are taken, but for the message before the last,
        and the values may be written at once."""

    def receive(self, values: Sequence[Tensor], origin: int) -> None:
        """Write into values, any views, what a stage has sent of the same sizes."""

    def reserve(self, sent: int, received: int) -> None:
        """Have memory for messages of up to that number of bytes now."""

    def settle(self) -> None:
        """Wait, on a GPU on the current stream, until all that was sent is taken."""


_groups: dict[str, Group] = {}
_links: list[Links] = []  # one at most


def set_group(name: str, group: Group | None) -> None:
    """Make a group known; None forgets it."""
    if group is None:
        _groups.pop(name, None)
    else:
        _groups[name] = group


def joined_group(name: str) -> Group | None:
    """The group of that name, if this process has joined one."""
    return _groups.get(name)


def set_links(links: Links | None) -> None:
    """Make the links between stages known; None forgets them."""
    _links[:] = [] if links is None else [links]


def links_of(stages: int) -> Links:
    """The links of a pipeline with that number of stages. Raises RuntimeError where this process is in no such
    pipeline."""
    count = _links[0].count if _links else 1
    if count != stages:
        raise RuntimeError(f"made for {stages} stages, this process is in a pipeline of {count}")
    return _links[0]


def group_of(name: str, ranks: int) -> Group:
    """The group of that name. Raises RuntimeError where it has another number of ranks: the graph is made for that
    number."""
    group = _groups.get(name, OneProcess())
    if group.size != ranks:
        raise RuntimeError(f"compiled for {ranks} ranks of the group {name!r}, this process is in one of {group.size}")
    return group
