"""Groups of ranks that torch.distributed joins: gloo on CPUs; on GPUs symmetric memory for what is small, else NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from graphllm.ir.groups import Group


class LibraryGroup:
    """A group whose collectives are those of torch's library."""

    def __init__(self, members: dist.ProcessGroup) -> None:
        self.rank, self.size, self._members = members.rank(), members.size(), members

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)
        dist.all_reduce(out, group=self._members)

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        dist.all_gather_into_tensor(work.view(-1), x.view(-1), group=self._members)
        out.unflatten(-1, (self.size, x.shape[-1])).copy_(work.movedim(0, -2))


def open_group(members: dist.ProcessGroup, device: torch.device) -> Group:
    """The group of some processes of which this is one, each with its device. All of them must call this. On GPUs the
    library's communicator is made now: it cannot be while a graph is captured."""
    if device.type != "cuda":
        return LibraryGroup(members)
    from graphllm.runtime.symmetric_memory import SymmetricGroup, is_reachable

    dist.all_reduce(torch.zeros(1, device=device), group=members)
    return SymmetricGroup(members, device) if is_reachable(members.size()) else LibraryGroup(members)
