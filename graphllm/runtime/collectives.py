"""Collectives of ranks that torch.distributed joins, by its library: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class LibraryGroup:
    """A group whose collectives are those of torch's library."""

    def __init__(self, members: dist.ProcessGroup) -> None:
        self.rank, self.size, self._members = members.rank(), members.size(), members

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)
        dist.all_reduce(out, group=self._members)

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        dist.all_gather_into_tensor(work.view(-1), x.view(-1), group=self._members)
        for rank in range(self.size):
            place_share(out, rank, work[rank])


def place_share(out: Tensor, rank: int, share: Tensor) -> None:
    """Write a rank's share [.., n] where it lies in out [.., m]; what lies behind m is left out."""
    begin = rank * share.shape[-1]
    place = out[..., begin : begin + share.shape[-1]]
    place.copy_(share[..., : place.shape[-1]])
