"""gather_rows: the rows of all ranks of a process group, one below the other."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ir.groups import group_of


def _cost(x: Tensor, group: str, ranks: int) -> Cost:
    return Cost((1 + ranks) * nbytes(x), 0)


@op(cost=_cost, boundary=True, collective=True)
def gather_rows(x: Tensor, group: str, ranks: int) -> Tensor:
    """The x [T, ..] of all ranks of a group, of one shape, in the order of the ranks: [ranks * T, ..], contiguous, on
    each rank. group, ranks: as for `all_reduce`."""
    out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    group_of(group, ranks).gather_rows(x.contiguous(), out)
    return out


@gather_rows.fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((ranks * x.shape[0], *x.shape[1:]))
