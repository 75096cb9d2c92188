"""wide_linear: a product whose result is float32, for numbers that choose, such as a router's."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(x_TI: Tensor, weight_OI: Tensor) -> Cost:
    out = x_TI.shape[0] * weight_OI.shape[0]
    return Cost(nbytes(x_TI, weight_OI) + 4 * out, 2 * out * x_TI.shape[1])


@op(cost=_cost, rowwise=True)
def wide_linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x_TI [T, I] times weight_OI [O, I] transposed, of the same dtype; returns [T, O] in float32, contiguous.

    Both are multiplied as if they were float32 (float64 if they are): nothing is rounded to their dtype.
    """
    dtype = torch.promote_types(x_TI.dtype, torch.float32)
    return torch.nn.functional.linear(x_TI.to(dtype), weight_OI.to(dtype))
