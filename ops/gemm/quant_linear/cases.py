"""Inputs for quant_linear: both formats, decode and prefill row counts, odd sizes, bias, gate."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 1.2e-2, "bfloat16": 1.3e-2, "float16": 1.2e-2}
# Bits of a weight, C, the dtype of what is packed and the range of its numbers.
FORMATS = {"int8": (8, 64, torch.int8, -127, 128), "int4": (4, 32, torch.uint8, 0, 256)}
_REASON = "kernels round x to a 127th of the largest of a group, which is 0.5 to 0.9 % of normal numbers"


def _case(
    T: int, out: int, inner: int, fmt: str, bias: bool = False, gated: bool = False,
    size: Literal["small", "real"] = "small",
) -> Case:  # fmt: skip
    def inputs(make: Maker) -> dict[str, Any]:
        bits, group, dtype, low, high = FORMATS[fmt]
        B, G, L = -(-out // 16), -(-inner // group), group * bits // 32
        scale = inner**-0.5 / 2 ** (bits - 2)
        return {
            "x_TI": make.normal(T, inner),
            "values_BGLRQ": make.integers(low, high, B, G, L, 16, 4, dtype=dtype),
            "scales_BGR": make.normal(B, G, 16, scale=scale, dtype=torch.bfloat16),
            "rows": out,
            "bias_O": make.normal(out) if bias else None,
            "gated": gated,
        }

    name = f"{fmt}_T{T}_O{out}_I{inner}" + ("_bias" if bias else "") + ("_gated" if gated else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


_LAYERS = ((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896))

CASES = (
    *(_case(1, 48, 64, fmt) for fmt in FORMATS),
    *(_case(3, 33, 96, fmt, bias=True) for fmt in FORMATS),
    *(_case(17, 80, 72, fmt) for fmt in FORMATS),
    *(_case(0, 16, 32, fmt) for fmt in FORMATS),
    *(_case(65, 40, 133, fmt, bias=True) for fmt in FORMATS),
    *(_case(T, 96, 133, fmt, bias=True, gated=True) for fmt in FORMATS for T in (1, 70)),
    *(_case(T, out, inner, fmt, size="real") for fmt in FORMATS for T in (1, 8, 128) for out, inner in _LAYERS),
)
