"""Ragged batches on Hopper whose rows come out bitwise the same in every batch: as `triton_ranges`, with the
warp-specialized kernel of `gluon_flash_ranges` for prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.paged_attention.gluon_flash_ranges import hopper_ranges
from graphllm.ops.attention.paged_attention.gluon_prefill import is_flash
from graphllm.ops.attention.paged_attention.op import paged_attention
from graphllm.ops.attention.paged_attention.triton_common import Rotary, problem, rotary_arguments, score_constants
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


def in_flash_ranges(site: CallSite) -> bool:
    """Whether the kernel of `gluon_flash_ranges` serves the prompts of a site."""
    return in_ranges(site) and is_flash(site)


def flash_range_configs(site: CallSite) -> list[Config]:
    """As many tiles as there is shared memory for, beside the queries, and as many programs as processors."""
    stages = 5 if site.args["q_THE"].shape[2] == 128 else 10
    return [
        {"programs": site.target.multiprocessors, "block_n": 64, "stages": stages, "length": RANGE, "turns": turns}
        for turns in (True, False)
    ]


@paged_attention.impl(
    "gluon_ranges", device="cuda", supports=in_flash_ranges, configs=flash_range_configs, row_order=range_order,
    remedy=problem,
)  # fmt: skip
def gluon_ranges(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    rotary: Rotary | None = None,
    *,
    programs: int,
    block_n: int,
    stages: int,
    length: int,
    turns: bool,
    **others: Any,
) -> Tensor:
    """Any ragged batch on Hopper, each row as if alone. rotary: for `rope_attention`."""
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    T, H, E = q_THE.shape
    K, P, S = kv_cache.shape[2], kv_cache.shape[3], seq_lens.shape[0]
    G = H // K
    (q_norm, _, cos, sin), rotation = rotary_arguments(rotary, q_THE)
    write_rows(k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, None, rotary)
    hopper_ranges(
        programs, q_THE, kv_cache, out_THE, block_table, query_start_loc, seq_lens, q_norm, cos, sin,
        q_THE if sinks_H is None else sinks_H, S, (T // (PROMPT_ROWS // G) + S) * K,
        Q_ROW=q_THE.stride(0), Q_HEAD=q_THE.stride(1), CACHE_BLOCK=kv_cache.stride(0), CACHE_KV=kv_cache.stride(1),
        CACHE_HEAD=kv_cache.stride(2), CACHE_POS=kv_cache.stride(3), TABLE_ROW=block_table.stride(0),
        SCALE=score_constants(scale, 0.0)[0], WINDOW=window, H=H, K=K, G=G, E=E, P=P, BLOCK_N=block_n, RANGE=length,
        STAGES=stages, SINKS=sinks_H is not None, TURNS=turns, **rotation,
    )  # fmt: skip
    launch_ranges(
        q_THE, k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, out_THE, scale, window, 0.0, sinks_H,
        None, rotary, block_n=block_n, length=length, single=True, **SINGLE,
    )  # fmt: skip
    return out_THE
