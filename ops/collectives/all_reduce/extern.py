"""all_reduce between the kernels of a step: a routine that the artifact names and the process's group carries out. It
runs in no process that compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphllm.ir.externs import Extern
from graphllm.ir.op import CallSite
from graphllm.ops.collectives.all_reduce.op import all_reduce

_into = Extern("all_reduce_into", "(Tensor x, Tensor(a!) out, str group, int ranks) -> ()")


def _order(site: CallSite, constants: Mapping[str, Any]) -> str:
    """Two numbers have one sum; of more, libraries choose the order by the size of all."""
    return "independent" if site.args["ranks"] <= 2 else ""


@all_reduce.impl("group_cpu", device="cpu", row_order=_order)
@all_reduce.impl("group", device="cuda", row_order=_order)
def summed(x: Tensor, group: str, ranks: int) -> Tensor:
    """gloo on CPUs; on GPUs symmetric memory where that is faster, else NCCL."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _into(x.contiguous(), out, group, ranks)
    return out
