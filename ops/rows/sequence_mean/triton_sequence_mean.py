"""Triton kernel for sequence_mean: a program adds some columns of the rows of one sequence."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.rows.sequence_mean.op import sequence_mean

_COLUMNS, _ROWS = 128, 16


@triton.jit(do_not_specialize_on_alignment=["S"])
def _mean_kernel(
    x_ptr, starts_ptr, rows_ptr, out_ptr, S,
    ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    r = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(rows_ptr + r)
    first = 0
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        starts = tl.load(starts_ptr + i, mask=i < S, other=0)
        first = tl.maximum(first, tl.max(tl.where(starts <= row, starts, 0)))
    sums = tl.zeros([BLOCK_D], tl.float32)
    for base in range(first, row + 1, BLOCK_T):
        t = base + tl.arange(0, BLOCK_T)
        inside = (t <= row)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + t.to(tl.int64)[:, None] * ROW + d[None, :], mask=inside, other=0.0)
        sums += tl.sum(x.to(tl.float32), axis=0)
    tl.store(out_ptr + r * D + d, sums / (row + 1 - first), mask=d < D)


def _supports(site: CallSite) -> bool:
    x = site.args["x_TD"]
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.stride(-1) == 1


@sequence_mean.impl("triton", device="cuda", supports=_supports)
def triton_sequence_mean(x_TD: Tensor, query_start_loc: Tensor, rows_R: Tensor) -> Tensor:
    """One program for each row and stretch of columns."""
    R, D = rows_R.shape[0], x_TD.shape[1]
    out_RD = torch.empty((R, D), dtype=torch.float32, device=x_TD.device)
    launch_triton(
        _mean_kernel, (R, (D + _COLUMNS - 1) // _COLUMNS),
        x_TD, query_start_loc, rows_R, out_RD, query_start_loc.shape[0] - 1,
        ROW=x_TD.stride(0), D=D, BLOCK_D=_COLUMNS, BLOCK_T=_ROWS, BLOCK_S=128,
        EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return out_RD
