"""swiglu: the gated activation of Llama-like feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(gate_up_T2F: Tensor) -> Cost:
    return Cost(nbytes(gate_up_T2F) * 3 // 2, 5 * gate_up_T2F.numel() // 2)


@op(cost=_cost, rowwise=True)
def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up: [T, F] in the input's dtype, contiguous.

    gate_up_T2F [T, 2F]: the gate in the first half of each row, up in the second; rows may be strided. An odd row
    length is an error. silu(x) = x / (1 + exp(-x)) is rounded to the dtype before the product. Source: Shazeer 2020.
    """
    gate_TF, up_TF = gate_up_T2F.unflatten(1, (2, gate_up_T2F.shape[1] // 2)).unbind(1)
    return torch.nn.functional.silu(gate_TF) * up_TF


@swiglu.fake(traceable=True)
def _(gate_up_T2F: Tensor) -> Tensor:
    T, width = gate_up_T2F.shape
    torch._check(width % 2 == 0, lambda: f"rows of {width} have no halves")
    return gate_up_T2F.new_empty(T, width // 2)
