"""add_lora: what the low-rank adapters of a step's tokens add to a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.lora.add_lora.operands import LowRank


def table_cost(rows: int, lora: LowRank | None) -> Cost:
    """Of the cheapest step with adapters, one with a single one: its tables. Nothing without tables."""
    if lora is None:
        return Cost(0, 0)
    a_LRI, b_LrO = lora.a_LRI, lora.b_LrO
    flops = 2 * rows * (a_LRI.shape[1] * a_LRI.shape[2] + b_LrO.shape[1] * b_LrO.shape[2])
    return Cost((nbytes(a_LRI) + nbytes(b_LrO)) // a_LRI.shape[0], flops)


def _cost(y_TO: Tensor, x_TI: Tensor, lora: LowRank) -> Cost:
    tables = table_cost(x_TI.shape[0], lora)
    return Cost(tables.bytes + nbytes(x_TI, lora.adapter_ids_T) + 2 * nbytes(y_TO), tables.flops)


@op(cost=_cost, rowwise=True, neutral=("adapter_ids_T", "y_TO"))
def add_lora(y_TO: Tensor, x_TI: Tensor, lora: LowRank) -> Tensor:
    """y + (x @ A.T) @ B for the A and B that each token's adapter has in the tables; [T, O] in y's dtype, contiguous.

    y_TO [T, O]: what the linear layer makes of x_TI [T, I]. Rows of tokens without an adapter stay as they are. Each of
    the layer's matrices has a product of its own.

    Products accumulate in float32 (float64 for float64 inputs) and are added to y before the one rounding to its
    dtype; an implementation may round x @ A.T to x's dtype.
    """
    a_LRI, b_LrO, adapter_ids_T, widths = lora
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    (L, R, _), r = a_LRI.shape, b_LrO.shape[1]
    # All products, then the products of other adapters are dropped: nothing is gathered, however long the step is.
    low_TLR = (x_TI.to(wide) @ a_LRI[1:].flatten(0, 1).to(wide).T).view(-1, L - 1, R)
    own_TL = adapter_ids_T[:, None] == torch.arange(1, L, device=adapter_ids_T.device)
    low_TLR = torch.where(own_TL[:, :, None], low_TLR, 0.0)
    parts = zip(low_TLR.split(r, 2), b_LrO[1:].to(wide).split(widths, 2), strict=True)
    delta_TO = torch.cat([low.flatten(1) @ b.flatten(0, 1) for low, b in parts], 1)
    return (y_TO.to(wide) + delta_TO).to(y_TO.dtype)


@add_lora.fake(traceable=True)
def _(y_TO: Tensor) -> Tensor:
    return torch.empty_like(y_TO, memory_format=torch.contiguous_format)


def adapted(y_TO: Tensor, x_TI: Tensor, lora: LowRank | None) -> Tensor:
    """The reference of `add_lora`, for ops that have it in them; y where there are no tables."""
    return y_TO if lora is None else add_lora.reference(y_TO, x_TI, lora)
