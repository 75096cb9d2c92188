"""Messages between the stages of a pipeline, by torch.distributed: gloo on CPUs, NCCL on GPUs.

A message is what one stage sends another in a step, in one piece. Each two stages that have something to say in one
direction have a group of their own for it, so that what waits for its receiver holds up nothing else: a library runs
what a group has to do in one order, and a sender waits there for the receiver.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphllm.program.stages import COPIES, MESSAGE_ALIGN


def link_directions(stages: int) -> list[tuple[int, int]]:
    """From which stage to which one messages go: each to the next one, and the last one to all."""
    last = stages - 1
    return [*((stage, stage + 1) for stage in range(last)), *((last, stage) for stage in range(last))]


class StageLinks:
    """The links of one stage.

    to, origins: the groups for what it sends and gets, by the other stage; both processes of a group are in no other
    with the same direction.
    device: of this process.

    All stages must make theirs at the same time.
    """

    def __init__(
        self,
        stage: int,
        count: int,
        to: Mapping[int, dist.ProcessGroup],
        origins: Mapping[int, dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        self.stage, self.count, self._device = stage, count, device
        self._copies = [self._memory(0)] * COPIES  # of what is sent, which take turns
        self._received, self._turn = self._memory(0), 0
        self._origins = dict(origins)
        self._outgoing = {other: _Outgoing(group, int(other > stage), device) for other, group in to.items()}
        self._open()

    def _open(self) -> None:
        """Have the library connect all now; it may not while a graph is captured, and takes memory."""
        token = torch.zeros(1, device=self._device)
        for origin, target in link_directions(self.count):
            if self.stage == origin:
                self.send([token], [target])
            elif self.stage == target:
                self.receive([token], origin)
        self.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def reserve(self, sent: int, received: int) -> None:
        """See `graphllm.ir.groups.Links`."""
        self.settle()
        self._copies = [self._memory(sent) for _ in range(COPIES)]
        self._received = self._memory(received)

    def settle(self) -> None:
        """See `graphllm.ir.groups.Links`."""
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
            self._copies[self._turn] = self._memory(size)
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
            self._received = self._memory(size)
        message = self._received[:size]
        dist.recv(message, group=self._origins[origin], group_src=int(origin > self.stage))
        for value, part in zip(values, _parts(message, values), strict=True):
            value.copy_(part)


class _Outgoing:
    """One link's sender. peer: the receiver's number in the group. On a GPU messages have a stream of their own, in
    which they wait for their receiver."""

    def __init__(self, members: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._members, self._peer = members, peer
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()  # a message must stay until it is taken

    def make_room(self) -> None:
        """Have the current stream wait until all messages are taken, except the last ones, which have other memory."""
        while len(self._sent) >= COPIES:
            self._take_back()

    def send(self, message: Tensor) -> None:
        """Send what the current stream has written."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._sent.append((dist.isend(message, group=self._members, group_dst=self._peer), message))

    def settle(self) -> None:
        """Have the current stream wait until all is taken."""
        while self._sent:
            self._take_back()

    def _take_back(self) -> None:
        work, _ = self._sent.popleft()
        if work is not None:
            work.wait()


def _size(values: Sequence[Tensor]) -> int:
    return sum(-(-value.nbytes // MESSAGE_ALIGN) * MESSAGE_ALIGN for value in values)


def _parts(message: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Where each value lies in a message, as tensors of their dtypes and shapes."""
    found, at = [], 0
    for value in values:
        found.append(message[at : at + value.nbytes].view(value.dtype).view(value.shape))
        at += -(-value.nbytes // MESSAGE_ALIGN) * MESSAGE_ALIGN
    return found
