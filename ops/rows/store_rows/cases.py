"""Inputs for store_rows: hidden states of a step, and its token ids."""

from __future__ import annotations

from typing import Any

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(T: int, N: int, D: int) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        if D:
            return {"rows": make.normal(T, D), "state": make.normal(N, D)}
        return {"rows": make.integers(0, 99, T), "state": make.integers(0, 99, N)}

    tolerance = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
    bucket = Bucket("mixed" if T > 1 else "decode", T, T)
    return Case(f"T{T}_N{N}_D{D}", inputs, tolerance, "numbers are copied", bucket)


CASES = (_case(1, 8, 32), _case(7, 7, 48), _case(5, 64, 0), _case(0, 8, 32))
