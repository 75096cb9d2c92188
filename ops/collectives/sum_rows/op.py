"""sum_rows: of what all ranks of a process group have computed for the rows of all, the sum for one's own."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ir.groups import group_of


def _cost(x: Tensor, group: str, ranks: int) -> Cost:
    return Cost(2 * nbytes(x), x.numel())


@op(cost=_cost, boundary=True, collective=True)
def sum_rows(x: Tensor, group: str, ranks: int) -> Tensor:
    """Of x [ranks * T, D], summed over the ranks of a group, the T rows that are this rank's, as `gather_rows` puts
    them: [T, D], contiguous. group, ranks: as for `all_reduce`."""
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    group_of(group, ranks).sum_rows(x.contiguous(), torch.empty_like(x), out)
    return out


@sum_rows.fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
