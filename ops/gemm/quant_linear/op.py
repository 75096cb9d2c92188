"""quant_linear: x @ weight.T + bias with the weight as packed integers and scales."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.activations.swiglu import swiglu


def _cost(
    x_TI: Tensor, values_BGLRQ: Tensor, scales_BGR: Tensor, rows: int, bias_O: Tensor | None, gated: bool
) -> Cost:
    products = x_TI.shape[0] * rows
    written = products // (2 if gated else 1) * x_TI.element_size()
    return Cost(nbytes(x_TI, values_BGLRQ, scales_BGR, bias_O) + written, 2 * products * x_TI.shape[1])


@op(cost=_cost, rowwise=True)
def quant_linear(
    x_TI: Tensor, values_BGLRQ: Tensor, scales_BGR: Tensor, rows: int, bias_O: Tensor | None = None, gated: bool = False
) -> Tensor:
    """x_TI [T, I] times a quantized weight [O, I] transposed, plus bias_O [O]; returns [T, O] in x's dtype. gated: the
    O results are a gate and a value half; `swiglu` makes [T, O / 2] of them.

    rows: O. The weight is values times scales, packed in blocks of R = 16 of its rows and groups of C of its inner
    entries. With o = 16 b + r and i = C g + c, weight[o, i] = n * scales[b, g, r], where n is an integer:
    - values int8 [B, G, L, 16, 4], L = C / 4, -127 to 127: n = values[b, g, l, r, q] with c = 4 l + q.
    - values uint8 [B, G, L, 16, 4], L = C / 8: n + 8 is the low half of values[b, g, l, r, q] for c = 8 l + q, and the
      high half for c = 8 l + 4 + q.
    So 64 bytes, a line, hold the same few entries of 16 rows. B = ceil(O / 16), G = ceil(I / C), C = 64 or 32 as the
    shape says; what pads the last block and the last group may be anything finite. scales are bfloat16.

    Products of the exact weights accumulate in float32 (float64 for float64 inputs); one rounding to x's dtype at the
    end. An implementation may keep float32 up to the gate's result; the reference rounds before the gate.
    """
    return wide_product(x_TI, dequantize(values_BGLRQ, scales_BGR, rows, x_TI.shape[1]), bias_O, gated)


@quant_linear.fake(traceable=True)
def _(x_TI: Tensor, rows: int, gated: bool) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], rows // (2 if gated else 1))


def wide_product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool) -> Tensor:
    """x @ weight.T + bias in float32 (float64 for float64 inputs), rounded to x's dtype; if gated, `swiglu` of that."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    bias = None if bias_O is None else bias_O.to(wide)
    out_TO = torch.nn.functional.linear(x_TI.to(wide), weight_OI.to(wide), bias).to(x_TI.dtype)
    return swiglu.reference(out_TO) if gated else out_TO


def dequantize(values_BGLRQ: Tensor, scales_BGR: Tensor, rows: int, inner: int) -> Tensor:
    """The weight [rows, inner] that values and scales of `quant_linear` stand for, exactly, in float32 (float64 for
    float64 scales)."""
    if values_BGLRQ.dtype == torch.int8:
        parts = values_BGLRQ.unsqueeze(3)
    else:
        parts = torch.stack([values_BGLRQ & 15, values_BGLRQ >> 4], 3).to(torch.int8) - 8
    numbers_BRGC = rearrange(parts, "b g l h r q -> b r g (l h q)")
    scales_BGR = scales_BGR.to(torch.promote_types(scales_BGR.dtype, torch.float32))
    weight_BRGC = numbers_BRGC * rearrange(scales_BGR, "b g r -> b r g 1")
    return rearrange(weight_BRGC, "b r g c -> (b r) (g c)")[:rows, :inner]
