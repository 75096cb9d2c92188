"""linear: x @ weight.T + bias."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.encodings.encoded_weights import decoded
from graphllm.ops.gemm.linear.operands import Matrix


def _cost(x_TI: Tensor, matrix: Matrix) -> Cost:
    out = x_TI.shape[0] * matrix.width(False)
    read = nbytes(x_TI, *matrix.tensors)
    return Cost(read + out * x_TI.element_size(), 2 * out * x_TI.shape[1])


@op(cost=_cost, rowwise=True)
def linear(x_TI: Tensor, matrix: Matrix) -> Tensor:
    """x_TI [T, I] times weight_OI [O, I] transposed, plus bias_O [O]; returns [T, O] in x's dtype.

    Products accumulate in float32 (float64 for float64 inputs); one rounding to x's dtype at the end.
    """
    weight_OI, bias_O, scales_GO, zeros_GO, form, group = matrix
    if scales_GO is not None:
        weight_OI = decoded(weight_OI, scales_GO, zeros_GO, form, group, x_TI.shape[1]).to(x_TI.dtype)
    return torch.nn.functional.linear(x_TI, weight_OI, bias_O)
