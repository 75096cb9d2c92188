"""Inputs for embedding: plain and scaled rows, repeated ids, no tokens."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 1e-7, "bfloat16": 4e-3, "float16": 6e-4}
_REASON = "the scale is rounded to the dtype, then the product (bf16 keeps 8 bits, fp16 11)"


def _case(T: int, V: int, D: int, scale: float = 1.0, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        return {"token_ids_T": make.integers(0, V, T), "table_VD": make.normal(V, D), "scale": scale}

    name = f"T{T}_V{V}_D{D}" + (f"_scale{scale:.4g}" if scale != 1.0 else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(1, 50, 32),
    _case(7, 40, 24, scale=24**0.5),
    _case(65, 16, 40),
    _case(0, 16, 32, scale=32**0.5),
    *(_case(T, 151936, 896, size="real") for T in (1, 64, 1024)),
    *(_case(T, 262144, 3072, scale=3072**0.5, size="real") for T in (1, 64, 1024)),
)
