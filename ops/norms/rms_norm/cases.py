"""Inputs for rms_norm: rows and heads, both forms of the weight, tiny rows that eps decides, no tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 8e-4}
_REASON = "float32 statistics; Llama's form rounds to the dtype twice, before and after the weight"


def _case(
    *shape: int,
    offset: float = 0.0,
    scale: float = 1.0,
    qkv: bool = False,
    size: Literal["small", "real"] = "small",
    wide: bool = False,
) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        x = make.normal(*shape, scale=scale)
        if qkv:  # the queries as a view of the merged projection
            x = make.normal(shape[0], 2 * shape[1], shape[2])[:, : shape[1]]
        return {
            "x": x,
            "weight": make.normal(shape[-1], dtype=torch.float32 if wide else None),
            "eps": 1e-6,
            "offset": offset,
        }

    name = "x".join(map(str, shape)) + (f"_offset{offset:g}" if offset else "")
    name += (f"_scale{scale:g}" if scale != 1.0 else "") + ("_view" if qkv else "") + ("_wide" if wide else "")
    T = shape[0]
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(1, 32),
    _case(7, 48, offset=1.0),
    _case(65, 40, scale=1e-3),
    _case(7, 48, wide=True),
    _case(5, 4, 16, qkv=True),
    _case(6, 2, 32, offset=1.0, qkv=True),
    _case(0, 32),
    *(_case(T, 896, size="real") for T in (1, 64, 1024)),
    *(_case(T, 4096, size="real") for T in (1, 64, 1024)),
    *(_case(T, 32, 128, qkv=True, size="real") for T in (1, 64, 1024)),
)
