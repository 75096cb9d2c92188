"""Collectives of ranks that torch.distributed joins, by its library: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from graphllm.runtime.ranks.host_exchange import HostExchange


class LibraryGroup:
    """A group with the collectives of torch.distributed. host: its exchange memory, where the host's memory is used."""

    def __init__(self, members: dist.ProcessGroup, host: HostExchange | None = None) -> None:
        self._host, self.exchange = host, None if host is None else host.table
        self.rank, self.size, self._members = members.rank(), members.size(), members

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)
        dist.all_reduce(out, group=self._members)

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        dist.all_gather_into_tensor(work.view(-1), x.view(-1), group=self._members)
        for rank in range(self.size):
            place_share(out, rank, work[rank])

    def gather_rows(self, x: Tensor, out: Tensor) -> None:
        if x.numel():
            dist.all_gather_into_tensor(out.view(-1), x.view(-1), group=self._members)

    def sum_rows(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        if not x.numel():
            return
        if x.is_cuda:
            dist.reduce_scatter_tensor(out, x, group=self._members)
            return
        self.all_reduce(x, work)  # gloo scatters no sums
        out.copy_(work[self.rank * len(out) : (self.rank + 1) * len(out)])

    def broadcast(self, x: Tensor, origin: int) -> None:
        if x.numel():
            whole = x.contiguous()
            dist.broadcast(_bytes(whole), group=self._members, group_src=origin)
            if whole is not x:
                x.copy_(whole)

    def let_go(self) -> None:
        if self._host is not None:
            self._host.fill()


def send_logits(logits: Tensor) -> None:
    """Replace every rank's logits by rank 0's."""
    dist.broadcast(logits, src=0)


def _bytes(x: Tensor) -> Tensor:
    """Not every library moves numbers of every dtype."""
    return x.reshape(-1).view(torch.uint8)


def place_share(out: Tensor, rank: int, share: Tensor) -> None:
    """Write a rank's share [.., n] to its place in out [.., m]; columns beyond m are left out."""
    begin = rank * share.shape[-1]
    place = out[..., begin : begin + share.shape[-1]]
    place.copy_(share[..., : place.shape[-1]])
