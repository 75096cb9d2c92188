"""Ragged batches on Hopper: as `triton_prefill`, with the warp-specialized kernel of `gluon_flash` for prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphllm.ir import CallSite, runs_gluon
from graphllm.ops.attention.paged_attention.gluon_flash import hopper_flash
from graphllm.ops.attention.paged_attention.op import paged_attention
from graphllm.ops.attention.paged_attention.triton_common import Rotary, problem, rotary_arguments, score_constants
from graphllm.ops.attention.paged_attention.triton_decode import Config, launch_decode, plan_splits
from graphllm.ops.attention.paged_attention.triton_verify import is_mixed
from graphllm.ops.attention.paged_attention.triton_write import write_rows

_BLOCK_M = 128  # query rows of a work item


def flash_configs(site: CallSite) -> list[Config]:
    """Launch constants of the kernel: as many programs as the GPU has processors, on each of which one fits."""
    return [
        {"programs": site.target.multiprocessors, "block_n": 128, "stages": 2, "turns": turns}
        for turns in (True, False)
    ]


def is_flash(site: CallSite) -> bool:
    """Whether the kernel serves the site: a cache of 16 bits, scores as they are, causal, heads of 64 or 128."""
    q, cache = site.args["q_THE"], site.args["kv_cache"]
    H, E = q.shape[1:]
    plain = site.args["softcap"] == 0 and site.args["kv_scales"] is None and site.args["ancestors_T"] is None
    position = cache.stride(3)
    tiled = E in (64, 128) and H // cache.shape[2] <= 32 and all(cache.stride(i) % position == 0 for i in (0, 1, 2))
    aligned = all(n % 8 == 0 for n in (q.stride(0), q.stride(1), q.storage_offset(), position))
    halves = cache.dtype == q.dtype and q.dtype in (torch.bfloat16, torch.float16)
    return runs_gluon(site.target) and halves and plain and tiled and aligned and is_mixed(site)


@paged_attention.impl("gluon_prefill", device="cuda", supports=is_flash, configs=flash_configs, remedy=problem)
def gluon_prefill(
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
    turns: bool,
    **others: Any,
) -> Tensor:
    """Any ragged batch. rotary: for `rope_attention`."""
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    T, H, E = q_THE.shape
    K, P, S = kv_cache.shape[2], kv_cache.shape[3], seq_lens.shape[0]
    G = H // K
    (q_norm, _, cos, sin), rotation = rotary_arguments(rotary, q_THE)
    write_rows(k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, None, rotary)
    items = (T // (_BLOCK_M // G) + S) * K
    hopper_flash(
        programs, q_THE, kv_cache, out_THE, block_table, query_start_loc, seq_lens, q_norm, cos, sin,
        q_THE if sinks_H is None else sinks_H, S, items,
        Q_ROW=q_THE.stride(0), Q_HEAD=q_THE.stride(1), CACHE_BLOCK=kv_cache.stride(0), CACHE_KV=kv_cache.stride(1),
        CACHE_HEAD=kv_cache.stride(2), CACHE_POS=kv_cache.stride(3), TABLE_ROW=block_table.stride(0),
        SCALE=score_constants(scale, 0.0)[0], WINDOW=window, H=H, K=K, G=G, E=E, P=P, BLOCK_N=block_n, STAGES=stages,
        SINKS=sinks_H is not None, TURNS=turns, **rotation,
    )  # fmt: skip
    launch_decode(
        q_THE, k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, out_THE, scale, window, 0.0, sinks_H,
        None, rotary, write=False, **plan_splits(0, H, K, block_table.shape[1] * P, q_THE.dtype, E),
    )  # fmt: skip
    return out_THE
