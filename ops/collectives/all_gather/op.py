"""all_gather: what all ranks of a process group have, side by side."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ir.groups import group_of


def _cost(x: Tensor, group: str, ranks: int, width: int) -> Cost:
    return Cost((1 + ranks) * nbytes(x), 0)


@op(cost=_cost, boundary=True, collective=True)
def all_gather(x: Tensor, group: str, ranks: int, width: int) -> Tensor:
    """The x [.., n] of all ranks of a group, of one shape, along the last dimension in the order of the ranks, and of
    these ranks * n entries the first ``width``: [.., width], contiguous, on each rank. group, ranks: as for
    `all_reduce`."""
    out = x.new_empty((*x.shape[:-1], width))
    group_of(group, ranks).all_gather(x.contiguous(), x.new_empty((ranks, *x.shape)), out)
    return out


@all_gather.fake
def _(x: Tensor, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))
