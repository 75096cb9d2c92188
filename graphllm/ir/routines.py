"""graphllm's own extern routines, by name: what an artifact calls that a library computes."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_product(codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Rows times weights, both float8 in pairs; see the op scaled_linear."""
    rows, columns = (t.view(torch.float8_e4m3fn) for t in (codes, weight))
    torch._scaled_mm(
        rows, columns.t(), scale_a=row_scales, scale_b=scales, out_dtype=out.dtype, use_fast_accum=True, out=out
    )
