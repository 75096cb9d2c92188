"""Inputs for rope: all or part of each head, queries as views of the merged projection, no tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 8e-4}
_REASON = "cosine and sine, both products and their sum are rounded to the dtype"


def _case(
    T: int,
    H: int,
    E: int,
    F: int,
    view: bool = False,
    size: Literal["small", "real"] = "small",
    interleaved: bool = False,
) -> Case:  # fmt: skip
    def inputs(make: Maker) -> dict[str, Any]:
        x_THE = make.normal(T, H + 2, E)[:, :H] if view else make.normal(T, H, E)
        angle_TF = make.normal(T, F, scale=3.0, dtype=torch.float32)
        return {"x_THE": x_THE, "cos_TF": angle_TF.cos(), "sin_TF": angle_TF.sin(), "interleaved": interleaved}

    name = f"T{T}_H{H}_E{E}_F{F}" + ("_view" if view else "") + ("_interleaved" if interleaved else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(1, 4, 16, 8),
    _case(7, 2, 32, 16, view=True),
    _case(65, 3, 24, 8),
    _case(6, 1, 16, 4, view=True),
    _case(0, 4, 16, 8),
    _case(7, 2, 32, 16, interleaved=True),
    _case(65, 3, 24, 8, view=True, interleaved=True),
    *(_case(T, 14, 64, 32, view=True, size="real") for T in (1, 64, 1024)),
    *(_case(T, 32, 128, 64, view=True, size="real") for T in (1, 64, 1024)),
)
