"""Inputs for scaled_linear: small, and the layers of an 8B model."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.encodings.encoded_weights import encoded
from graphllm.ops.gemm.quantize_rows import quantize_rows

_TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3}
_REASON = "one rounding to the dtype, of sums of 14 bits, may differ by a step"


def _case(T: int, out: int, inner: int, size: Literal["small", "real"] = "small", fused: str = "") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        codes, scales = quantize_rows.reference(make.normal(T, inner, dtype=torch.float32))
        weight = encoded(make, "float8-0", out, inner)
        return {
            "codes_TW": codes, "row_scales_T1": scales, "weight_OW": weight["weight_OI"],
            "scales_1O": weight["scales_GO"], "dtype": str(make.dtype).removeprefix("torch."),
            "residual_TN": make.normal(T, out) if "residual" in fused else None, "gated": "gate" in fused,
        }  # fmt: skip

    tolerance = {**_TOLERANCE, "bfloat16": 2e-2} if fused else _TOLERANCE
    return Case(f"T{T}_O{out}_I{inner}{fused and '_' + fused}", inputs, tolerance, _REASON, Bucket("mixed", T, T), size)


CASES = (
    _case(0, 16, 128),
    _case(3, 48, 200),
    _case(17, 48, 200),
    _case(70, 96, 1400, fused="residual"),
    _case(20, 160, 256, fused="gate"),
    *(_case(T, *shape, size="real") for T in (32, 64, 128, 512, 8192)
      for shape in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
)  # fmt: skip
