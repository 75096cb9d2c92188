"""sum_rows between the kernels of a step, as all_reduce is."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir.externs import Extern
from graphllm.ops.collectives.sum_rows.op import sum_rows

_into = Extern("sum_rows_into", "(Tensor x, Tensor(a!) work, Tensor(b!) out, str group, int ranks) -> ()")


@sum_rows.impl("group_cpu", device="cpu")
@sum_rows.impl("group", device="cuda")
def summed(x: Tensor, group: str, ranks: int) -> Tensor:
    """gloo on CPUs, which has sums of all rows only; NCCL on GPUs."""
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    _into(x.contiguous(), x.new_empty(x.shape), out, group, ranks)
    return out
