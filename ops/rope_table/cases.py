"""Inputs for rope_table: one row of frequencies, LongRoPE's two, dynamic NTK on both sides of the original length."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 2e-5}
_REASON = "a float32 angle of a thousand radians is off by 6e-5, and so are its cosine and sine"


def _case(
    T: int,
    F: int,
    R: int = 1,
    original_len: int = 0,
    ntk_factor: float = 0.0,
    scale: float = 1.0,
    size: Literal["small", "real"] = "small",
) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        positions_T = make.integers(0, 1000, T)
        rows = [[10000.0 ** (-f / F) / (1 + 3 * r) for f in range(F)] for r in range(R)]
        return {
            "positions_T": positions_T,
            "context_len_T": positions_T + make.integers(1, 100, T),
            "inv_freq_RF": make.tensor(rows, torch.float32),
            "original_len": original_len,
            "ntk_factor": ntk_factor,
            "scale": scale,
        }

    kind = ("_ntk" if ntk_factor else "") + ("_long" if R == 2 else "") + (f"_scale{scale:g}" if scale != 1.0 else "")
    bucket = Bucket("mixed" if T > 64 else "decode", T, T)
    return Case(f"T{T}_F{F}{kind}", inputs, _TOLERANCE, _REASON, bucket, size)


CASES = (
    _case(1, 8),
    _case(9, 16, scale=1.2),
    _case(66, 12, R=2, original_len=500, scale=1.1),
    _case(33, 8, original_len=500, ntk_factor=4.0),
    _case(3, 1, original_len=500, ntk_factor=4.0),
    _case(0, 8, original_len=500, ntk_factor=4.0),
    _case(0, 8, R=2, original_len=500),
    *(_case(T, 64, size="real") for T in (1, 64, 1024)),
)
