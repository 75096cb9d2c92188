"""all_reduce: the sum over the ranks of a process group."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ir.groups import group_of


def _cost(x: Tensor, group: str, ranks: int) -> Cost:
    return Cost(2 * nbytes(x), x.numel())


@op(cost=_cost, collective=True, rowwise=True)
def all_reduce(x: Tensor, group: str, ranks: int) -> Tensor:
    """The sum of x, of any shape, over the ranks of a group, on each of them; the order of the sum is the library's.

    group: the name under which the process joined it, "tensor" for tensor parallelism; one that it never joined has
    only this process. ranks: of the group that the graph was made for; another size is an error, because the sum would
    be of other parts.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    group_of(group, ranks).all_reduce(x.contiguous(), out)
    return out


@all_reduce.fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
