"""Messages between the stages of a pipeline, by torch.distributed: gloo on CPUs, NCCL on GPUs.

A message is what one stage sends another in a step. On CPUs, where steps overlap, it goes in one piece, and each two
stages that have something to say in one direction have a group of their own for it, so that what waits for its receiver
holds up nothing else: a library runs what a group has to do in one order, and a sender waits there for the receiver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphllm.program.stages import COPIES, MESSAGE_ALIGN
from graphllm.runtime.collectives import LibraryGroup


def link_directions(stages: int) -> list[tuple[int, int]]:
    """From which stage to which one messages go: each to the next one, and the last one to all."""
    last = stages - 1
    return [*((stage, stage + 1) for stage in range(last)), *((last, stage) for stage in range(last))]


class CapturedLinks:
    """The links of one stage on GPUs. Messages are parts of captured graphs, in which each waits for the other side.
    members: the ranks with the same share of each stage."""

    def __init__(self, members: dist.ProcessGroup) -> None:
        self._group = LibraryGroup(members)
        self.stage, self.count = self._group.rank, self._group.size

    def reserve(self, sent: int, received: int) -> None:
        """Nothing: what is sent lies in the arena."""

    def send(self, values: Sequence[Tensor], to: Sequence[int]) -> None:
        """See `graphllm.ir.groups.Links`."""
        for value in values:
            if self.stage == self.count - 1:  # to all
                self._group.broadcast(value, self.stage)
            else:
                self._group.send(value, to[0])

    def receive(self, values: Sequence[Tensor], origin: int) -> None:
        """See `graphllm.ir.groups.Links`."""
        for value in values:
            if origin == self.count - 1:
                self._group.broadcast(value, origin)
            else:
                self._group.receive(value, origin)


class StageLinks:
    """The links of one stage on CPUs. to, origins: the groups for what it sends and gets, by the other stage; both
    processes of a group are in no other with the same direction. All stages must make theirs at the same time."""

    def __init__(
        self,
        stage: int,
        count: int,
        to: Mapping[int, dist.ProcessGroup],
        origins: Mapping[int, dist.ProcessGroup],
    ) -> None:
        self.stage, self.count = stage, count
        self._copies = [_memory(0)] * COPIES  # of what is sent, which take turns
        self._received, self._turn = _memory(0), 0
        self._origins = dict(origins)
        self._outgoing = {other: _Outgoing(group, int(other > stage)) for other, group in to.items()}
        self._open()

    def _open(self) -> None:
        """Have the library connect all now."""
        token = torch.zeros(1)
        for origin, target in link_directions(self.count):
            if self.stage == origin:
                self.send([token], [target])
            elif self.stage == target:
                self.receive([token], origin)
        self._settle()

    def reserve(self, sent: int, received: int) -> None:
        """See `graphllm.ir.groups.Links`."""
        self._settle()
        self._copies = [_memory(sent) for _ in range(COPIES)]
        self._received = _memory(received)

    def _settle(self) -> None:
        for link in self._outgoing.values():
            link.settle()

    def send(self, values: Sequence[Tensor], to: Sequence[int]) -> None:
        """See `graphllm.ir.groups.Links`."""
        if not (size := _size(values)):
            return
        self._turn = (self._turn + 1) % COPIES
        for stage in to:
            self._outgoing[stage].make_room()
        if len(self._copies[self._turn]) < size:
            self._copies[self._turn] = _memory(size)
        message = self._copies[self._turn][:size]
        for value, part in zip(values, _parts(message, values), strict=True):
            part.copy_(value)
        for stage in to:
            self._outgoing[stage].send(message)

    def receive(self, values: Sequence[Tensor], origin: int) -> None:
        """See `graphllm.ir.groups.Links`."""
        if not (size := _size(values)):
            return
        if len(self._received) < size:
            self._received = _memory(size)
        message = self._received[:size]
        dist.recv(message, group=self._origins[origin], group_src=int(origin > self.stage))
        for value, part in zip(values, _parts(message, values), strict=True):
            value.copy_(part)


class _Outgoing:
    """One link's sender. peer: the receiver's number in the group."""

    def __init__(self, members: dist.ProcessGroup, peer: int) -> None:
        self._members, self._peer = members, peer
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()  # a message must stay until it is taken

    def make_room(self) -> None:
        """Wait until all messages but the last ones are taken, whose memory is another."""
        while len(self._sent) >= COPIES:
            self._take_back()

    def send(self, message: Tensor) -> None:
        """Send it, at some time until it is waited for."""
        self._sent.append((dist.isend(message, group=self._members, group_dst=self._peer), message))

    def settle(self) -> None:
        """Wait until all is taken."""
        while self._sent:
            self._take_back()

    def _take_back(self) -> None:
        work, _ = self._sent.popleft()
        if work is not None:
            work.wait()


def _memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _size(values: Sequence[Tensor]) -> int:
    return sum(-(-value.nbytes // MESSAGE_ALIGN) * MESSAGE_ALIGN for value in values)


def _parts(message: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Where each value lies in a message, as tensors of their dtypes and shapes."""
    found, at = [], 0
    for value in values:
        found.append(message[at : at + value.nbytes].view(value.dtype).view(value.shape))
        at += -(-value.nbytes // MESSAGE_ALIGN) * MESSAGE_ALIGN
    return found
