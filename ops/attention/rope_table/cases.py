"""Inputs for rope_table: few and many tokens and pairs, with an attention factor."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 2e-5}
_REASON = "a float32 angle of a thousand radians is off by 6e-5, and so are its cosine and sine"


def _case(T: int, F: int, scale: float = 1.0, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        frequencies = [10000.0 ** (-f / F) for f in range(F)]
        return {
            "positions_T": make.integers(0, 1000, T),
            "inv_freq_F": make.tensor(frequencies, torch.float32),
            "scale": scale,
        }

    kind = f"_scale{scale:g}" if scale != 1.0 else ""
    bucket = Bucket("mixed" if T > 64 else "decode", T, T)
    return Case(f"T{T}_F{F}{kind}", inputs, _TOLERANCE, _REASON, bucket, size)


CASES = (
    _case(1, 8),
    _case(9, 16, scale=1.2),
    _case(66, 12),
    _case(3, 1),
    _case(0, 8),
    *(_case(T, 64, size="real") for T in (1, 64, 1024)),
)
