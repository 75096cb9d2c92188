"""gather_rows between the kernels of a step, as all_reduce is."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir.externs import Extern
from graphllm.ops.collectives.gather_rows.op import gather_rows

_into = Extern("gather_rows_into", "(Tensor x, Tensor(a!) out, str group, int ranks) -> ()")


@gather_rows.impl("group_cpu", device="cpu")
@gather_rows.impl("group", device="cuda")
def gathered(x: Tensor, group: str, ranks: int) -> Tensor:
    """gloo on CPUs, NCCL on GPUs."""
    out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    _into(x.contiguous(), out, group, ranks)
    return out
