"""all_gather between the kernels of a step, as all_reduce is."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir.externs import Extern
from graphllm.ops.collectives.all_gather.op import all_gather

_into = Extern("all_gather_into", "(Tensor x, Tensor(a!) work, Tensor(b!) out, str group, int ranks) -> ()")


@all_gather.impl("group_cpu", device="cpu")
@all_gather.impl("group", device="cuda")
def gathered(x: Tensor, group: str, ranks: int, width: int) -> Tensor:
    """gloo on CPUs; on GPUs symmetric memory for what is small, NCCL for the rest."""
    out = x.new_empty((*x.shape[:-1], width))
    _into(x.contiguous(), x.new_empty((ranks, *x.shape)), out, group, ranks)
    return out
