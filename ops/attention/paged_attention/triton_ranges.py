"""Ragged batches with rows that come out bitwise the same in every batch: the kernel of `triton_range_kernel` for
all."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.paged_attention.op import paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rotary, Rows, Scores
from graphllm.ops.attention.paged_attention.triton_common import problem
from graphllm.ops.attention.paged_attention.triton_decode import Config
from graphllm.ops.attention.paged_attention.triton_range_kernel import (
    PROMPT_ROWS,
    RANGE,
    SINGLE,
    in_ranges,
    launch_ranges,
    range_order,
)
from graphllm.ops.attention.paged_attention.triton_write import write_rows

_MOST_PARTIAL = 1 << 29  # bytes of what programs leave to the one that joins it
_MOST_PROGRAMS = 32  # that share the ranges of a sequence


def range_configs(site: CallSite) -> list[Config]:
    """The same tiles and ranges at all sizes; 128 rows are two times 64, each independent. Single tokens in steps with
    prompts have one program each."""
    (_, H, E), (_, _, K, P, _) = site.args["q_THE"].shape, site.args["kv_cache"].shape
    parts = -(-site.args["block_table"].shape[1] * P // RANGE)
    most, programs, single = site.bucket.hi, 1, site.bucket.kind == "decode"
    if single and most * parts * H * (E + 2) * 4 <= _MOST_PARTIAL:
        programs = max(1, min(parts, _MOST_PROGRAMS, 4 * site.target.multiprocessors // max(1, most * K)))
    block_m, warps = (SINGLE["block_m"], SINGLE["warps"]) if single else (PROMPT_ROWS, 8)
    return [
        {"block_m": block_m, "block_n": 64, "warps": warps, "stages": stages, "length": RANGE, "parts": parts,
         "programs": programs, "single": int(single)}
        for stages in (2, 3)
    ]  # fmt: skip


@paged_attention.impl(
    "triton_ranges", device="cuda", supports=in_ranges, configs=range_configs, row_order=range_order, remedy=problem
)
def triton_ranges(
    rows: Rows, paged: Paged, scores: Scores, kv_scales: Tensor | None, rotary: Rotary | None, *, block_m: int,
    block_n: int, warps: int, stages: int, length: int, parts: int, programs: int, single: int,
) -> Tensor:  # fmt: skip
    """Any ragged batch without trees, each row as if it were the only one."""
    out_THE = torch.empty_like(rows.q_THE, memory_format=torch.contiguous_format)
    launch = functools.partial(
        launch_ranges, rows, paged, out_THE, scores, kv_scales, rotary, block_n=block_n, length=length,
        parts=parts, programs=programs,
    )  # fmt: skip
    if single:
        launch(block_m=block_m, warps=warps, stages=stages, single=True)
    else:
        write_rows(rows.k_TKE, rows.v_TKE, paged, kv_scales, rotary)
        launch(block_m=block_m, warps=warps, stages=stages, single=False)
        launch(**SINGLE, single=True)
    return out_THE
