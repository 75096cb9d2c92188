"""linear: x @ weight.T + bias."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Cost:
    out = x_TI.shape[0] * weight_OI.shape[0]
    return Cost(nbytes(x_TI, weight_OI, bias_O) + out * x_TI.element_size(), 2 * out * x_TI.shape[1])


@op(cost=_cost, rowwise=True)
def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x_TI [T, I] times weight_OI [O, I] transposed, plus bias_O [O]; returns [T, O] in x's dtype.

    Products accumulate in float32 (float64 for float64 inputs); one rounding to x's dtype at the end.
    """
    return torch.nn.functional.linear(x_TI, weight_OI, bias_O)
