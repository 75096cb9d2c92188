"""Inputs for soft_cap: small and saturated values, odd widths, no rows, real vocabularies."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 5e-7, "bfloat16": 1e-2, "float16": 1.5e-3}
_REASON = "quotient, tanh and product are rounded to the dtype once each"


def _case(S: int, V: int, cap: float, scale: float = 1.0, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        return {"x": make.normal(S, V, scale=scale), "cap": cap}

    name = f"S{S}_V{V}_cap{cap:g}" + (f"_scale{scale:g}" if scale != 1.0 else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("decode", S, S), size)


CASES = (
    _case(1, 65, 6.0),
    _case(5, 48, 6.0, scale=20.0),
    _case(0, 48, 30.0),
    *(_case(S, 256000, 30.0, scale=4.0, size="real") for S in (1, 32)),
)
