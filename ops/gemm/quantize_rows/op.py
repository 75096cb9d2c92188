"""quantize_rows: rows rounded to float8, each with a scale of its own, as a product of float8 takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.encodings.encoded_weights import packed, width_of
from graphllm.ops.norms.rms_norm import rms_norm

LARGEST = 448.0  # of E4M3


def _cost(x_TI: Tensor, norm_I: Tensor | None, gated: bool) -> Cost:
    numbers = x_TI.numel() // (2 if gated else 1)
    return Cost(nbytes(x_TI, norm_I) + numbers + 4 * x_TI.shape[0], 4 * numbers)


@op(cost=_cost, rowwise=True)
def quantize_rows(
    x_TI: Tensor, norm_I: Tensor | None = None, eps: float = 0.0, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes [T, W] int16 and scales [T, 1] float32 of the rows of x [T, I], or, gated, of `swiglu` of x, or of their
    `rms_norm` with norm_I [I], eps and offset 0.

    A row's scale is a 448th of its largest magnitude (at least 1e-12). Codes are E4M3, packed as the rows of a float8
    weight with one group a row (`graphllm.ops.encodings.encoded_weights`); what pads a row is zero. An
    implementation may leave normalized or gated rows unrounded. Source: the dynamic per-token scales of FP8
    checkpoints.
    """
    if gated:
        x_TI = swiglu.reference(x_TI)
    if norm_I is not None:
        x_TI = rms_norm.reference(x_TI, norm_I, eps)
    wide = x_TI.float()
    scales_T1 = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-12)
    codes = (wide / scales_T1).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return packed(codes, "float8", 0), scales_T1


@quantize_rows.fake
def _(x_TI: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    inner = x_TI.shape[1] // (2 if gated else 1)
    codes = x_TI.new_empty((x_TI.shape[0], width_of("float8", inner, 0)), dtype=torch.int16)
    return codes, x_TI.new_empty((x_TI.shape[0], 1), dtype=torch.float32)
