"""scaled_linear: the product of rows and weights that are both float8, with a gate and a residual after it."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.encodings.encoded_weights import decoded


def _cost(
    codes_TW: Tensor, row_scales_T1: Tensor, weight_OW: Tensor, scales_1O: Tensor, dtype: str,
    residual_TN: Tensor | None, gated: bool,
) -> Cost:  # fmt: skip
    out = codes_TW.shape[0] * weight_OW.shape[0]
    read = nbytes(codes_TW, row_scales_T1, weight_OW, scales_1O, residual_TN)
    return Cost(read + out * getattr(torch, dtype).itemsize // (2 if gated else 1), 4 * out * codes_TW.shape[1])


@op(cost=_cost, rowwise=True)
def scaled_linear(
    codes_TW: Tensor,
    row_scales_T1: Tensor,
    weight_OW: Tensor,
    scales_1O: Tensor,
    dtype: str,
    residual_TN: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Rows as `quantize_rows` makes them times a float8 weight transposed: [T, O] in ``dtype``, contiguous; or, gated,
    `swiglu` of that, [T, O / 2]; and what residual_TN, of the result's shape, adds.

    codes_TW [T, W] int16, row_scales_T1 [T, 1] float32; weight_OW [O, W] int16 and scales_1O [1, O] float32: a float8
    weight with one scale a row (`graphllm.ops.encodings.encoded_weights`). Products are exact and added in float32 (an
    implementation may keep 14 bits of the sums' mantissas, as the tensor cores of sm_90 do) and rounded; an
    implementation need not round before the gate and the residual.
    """
    inner = 2 * codes_TW.shape[1]
    x_TI = decoded(codes_TW, row_scales_T1.T, None, "float8", 0, inner)
    weight_OI = decoded(weight_OW, scales_1O, None, "float8", 0, inner)
    out = (x_TI @ weight_OI.T).to(getattr(torch, dtype))
    if gated:
        out = swiglu.reference(out)
    return out if residual_TN is None else residual_TN + out


@scaled_linear.fake
def _(codes_TW: Tensor, weight_OW: Tensor, dtype: str, gated: bool) -> Tensor:
    width = weight_OW.shape[0] // (2 if gated else 1)
    return codes_TW.new_empty((codes_TW.shape[0], width), dtype=getattr(torch, dtype))
