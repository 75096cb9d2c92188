"""scaled_linear: the product of rows and weights that are both float8."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.encoded_weights import decoded


def _cost(codes_TW: Tensor, row_scales_T1: Tensor, weight_OW: Tensor, scales_1O: Tensor, dtype: str) -> Cost:
    out = codes_TW.shape[0] * weight_OW.shape[0]
    read = nbytes(codes_TW, row_scales_T1, weight_OW, scales_1O)
    return Cost(read + out * getattr(torch, dtype).itemsize, 4 * out * codes_TW.shape[1])


@op(cost=_cost, rowwise=True)
def scaled_linear(codes_TW: Tensor, row_scales_T1: Tensor, weight_OW: Tensor, scales_1O: Tensor, dtype: str) -> Tensor:
    """Rows as `quantize_rows` makes them times a float8 weight transposed: [T, O] in ``dtype``, contiguous.

    codes_TW [T, W] int16, row_scales_T1 [T, 1] float32; weight_OW [O, W] int16 and scales_1O [1, O] float32: a float8
    weight with one scale a row (`graphllm.ops.encoded_weights`). Products are exact and added in float32 (an
    implementation may keep 14 bits of the sums' mantissas, as the tensor cores of sm_90 do), rounded once.
    """
    inner = 2 * codes_TW.shape[1]
    x_TI = decoded(codes_TW, row_scales_T1.T, None, "float8", 0, inner)
    weight_OI = decoded(weight_OW, scales_1O, None, "float8", 0, inner)
    return (x_TI @ weight_OI.T).to(getattr(torch, dtype))


@scaled_linear.fake
def _(codes_TW: Tensor, weight_OW: Tensor, dtype: str) -> Tensor:
    return codes_TW.new_empty((codes_TW.shape[0], weight_OW.shape[0]), dtype=getattr(torch, dtype))
