"""Inputs for geglu: both forms of gelu, saturated gates, no tokens."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 8e-4}
_REASON = "gelu(gate) is rounded to the dtype, then the product"


def _case(
    T: int, F: int, approximate: str = "tanh", scale: float = 1.0, size: Literal["small", "real"] = "small"
) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        return {"gate_up_T2F": make.normal(T, 2 * F, scale=scale), "approximate": approximate}

    name = f"T{T}_F{F}_{approximate}" + (f"_scale{scale:g}" if scale != 1.0 else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(1, 48),
    _case(6, 40, scale=30.0),
    _case(66, 24, "none"),
    _case(0, 32),
    *(_case(T, 6912, size="real") for T in (1, 64, 1024)),
    *(_case(T, 9216, size="real") for T in (1, 64, 1024)),
)
