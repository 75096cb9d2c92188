"""Inputs for gather_rows, in a group of one: hidden states, no rows."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
_REASON = "one rank gathers its own numbers"


def _case(T: int, D: int, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        return {"x": make.normal(T, D), "group": "experts", "ranks": 1}

    return Case(f"T{T}_D{D}", inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (_case(1, 48), _case(66, 24), _case(0, 32), _case(64, 4096, size="real"))
