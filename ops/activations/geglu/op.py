"""geglu: the gated activation of Gemma's feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(gate_up_T2F: Tensor) -> Cost:
    return Cost(nbytes(gate_up_T2F) * 3 // 2, 10 * gate_up_T2F.numel() // 2)


@op(cost=_cost, rowwise=True)
def geglu(gate_up_T2F: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(gate) * up: [T, F] in the input's dtype, contiguous.

    gate_up_T2F [T, 2F]: the gate in the first half of each row, up in the second; rows may be strided. An odd row
    length is an error. approximate: "tanh" for gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), "none" for the
    exact x/2 (1 + erf(x / sqrt 2)); anything else is an error. gelu is rounded to the dtype before the product.
    Source: Shazeer 2020; Hendrycks & Gimpel 2016.
    """
    gate_TF, up_TF = gate_up_T2F.unflatten(1, (2, gate_up_T2F.shape[1] // 2)).unbind(1)
    return torch.nn.functional.gelu(gate_TF, approximate=approximate) * up_TF


@geglu.fake(traceable=True)
def _(gate_up_T2F: Tensor, approximate: str) -> Tensor:
    T, width = gate_up_T2F.shape
    torch._check(approximate in ("tanh", "none"), lambda: f"approximate is {approximate!r}: give 'tanh' or 'none'")
    torch._check(width % 2 == 0, lambda: f"rows of {width} have no halves")
    return gate_up_T2F.new_empty(T, width // 2)
