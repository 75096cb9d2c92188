"""Inputs for layer_norm: with and without bias, rows far from zero, no tokens."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 6e-4}
_REASON = "float32 statistics and products, then one rounding to the dtype (bf16 keeps 8 bits, fp16 11)"


def _case(T: int, D: int, bias: bool = True, shift: float = 0.0, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        x = make.normal(T, D) + shift
        return {"x": x, "weight": make.normal(D), "bias": make.normal(D) if bias else None, "eps": 1e-5}

    name = f"T{T}_D{D}" + ("" if bias else "_nobias") + (f"_shift{shift:g}" if shift else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(1, 32),
    _case(5, 48, bias=False),
    _case(66, 40, shift=4.0),
    _case(0, 32),
    *(_case(T, 768, size="real") for T in (1, 64, 1024)),
    *(_case(T, 4096, size="real") for T in (1, 64, 1024)),
)
