"""Inputs for wide_linear: routers at small and at real shapes."""

from __future__ import annotations

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-5, "float16": 1e-5}
_REASON = "products of two such numbers are exact in float32; sums in another order"


def _case(T: int, out: int, inner: int, size: str = "small") -> Case:
    def inputs(make: Maker) -> dict[str, object]:
        return {"x_TI": make.normal(T, inner), "weight_OI": make.normal(out, inner, scale=inner**-0.5)}

    bucket = Bucket("mixed" if T > 64 else "decode", T, T)
    return Case(f"T{T}_O{out}_I{inner}", inputs, _TOLERANCE, _REASON, bucket, size)  # type: ignore[arg-type]


CASES = (
    _case(1, 24, 64),
    _case(1, 20, 1000),
    _case(3, 40, 520),
    _case(17, 72, 136),
    _case(0, 16, 32),
    _case(70, 8, 2048),
    _case(300, 33, 64),
    *(_case(T, 64, 2048, "real") for T in (1, 32, 128, 8192)),
    *(_case(T, 256, 7168, "real") for T in (1, 32, 128, 8192)),
)
