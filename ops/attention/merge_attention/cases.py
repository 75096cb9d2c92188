"""Inputs for merge_attention: parts that a row does not see, and large and small scores."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(P: int, T: int, H: int, V: int, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        out, lse = make.normal(P, T, H, V), make.normal(P, T, H, scale=20.0, dtype=torch.float32)
        unseen = make.integers(0, 3, P, T, H) == 0
        return {
            "out_PTHV": out.masked_fill(unseen[..., None], float("nan")),
            "lse_PTH": lse.masked_fill(unseen, float("-inf")),
        }

    tolerance = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 1e-3}
    return Case(f"P{P}_T{T}_H{H}_V{V}", inputs, tolerance, "one rounding of the result", Bucket("mixed", T, T), size)


CASES = (
    _case(2, 0, 4, 32),
    _case(1, 3, 2, 16),
    _case(2, 33, 4, 32),
    _case(5, 7, 3, 20),
    _case(2, 8192, 16, 128, "real"),
)
