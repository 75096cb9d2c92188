"""Triton kernels for ragged batches of prefill and decode: store keys and values (`triton_write`), then flash attention
over the blocks.

A program of the flash kernel serves one block of query tokens of one sequence for one KV head, the query heads of that
KV head packed into the tile's rows. The grid has room for one partly filled block per sequence; a program finds its
sequence by comparing with query_start_loc, on the device. Sequences with a single query token or few go to the split-KV
kernels of triton_verify and triton_decode, which spread a long context over many programs.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102  (a branch on a constexpr joins no other condition)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.paged_attention.gluon_prefill import is_flash
from graphllm.ops.attention.paged_attention.op import paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rotary, Rows, Scores
from graphllm.ops.attention.paged_attention.triton_common import (
    as_queries,
    count_bits,
    find_sequence,
    load_bits,
    load_rotated,
    load_scales,
    multiply,
    power_of_2,
    problem,
    rotary_arguments,
    score_constants,
    soft_cap,
    tile_blocks,
    tile_slots,
    weights_of,
    window_tiles,
    write_heads,
)
from graphllm.ops.attention.paged_attention.triton_decode import Config
from graphllm.ops.attention.paged_attention.triton_verify import is_mixed, launch_few, plan_few
from graphllm.ops.attention.paged_attention.triton_write import cache_constants, write_rows


@triton.jit
def _attend_tiles(
    acc, top, total, q, head_ptr, table_row, position, end, lo, hi, row_scale, begin, bits, CACHE_BLOCK: tl.constexpr,
    CACHE_KV: tl.constexpr, CACHE_POS: tl.constexpr, LOG2E_CAP: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr,  # rows may be nodes of a tree: from position begin on they see what their bits say
    MASKED: tl.constexpr,  # some rows do not see some of these tiles' tokens
    E: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, E_PAD)
    cache_block = tile_blocks(table_row, lo, end, P, BLOCK_N)
    for tile in range(lo, hi):
        at = tile * BLOCK_N + n
        slots = head_ptr + tile_slots(cache_block, tile, CACHE_BLOCK, CACHE_POS, P, BLOCK_N)[:, None] + e[None, :]
        cache_block = tile_blocks(table_row, tile + 1, end, P, BLOCK_N)
        if MASKED:
            kept = at < end
            if WINDOW > 0:  # of what no row sees the block may be gone, and 0 * NaN is NaN
                kept = kept & (at > tl.min(position, axis=0) - WINDOW)
            inside = kept[:, None] & (e < E)[None, :]
            keys = tl.load(slots, mask=inside, other=0.0)
        elif E_PAD != E:
            keys = tl.load(slots, mask=(e < E)[None, :], other=0.0)
        else:
            keys = tl.load(slots)
        scores = multiply(q, tl.trans(keys.to(q.dtype)), tl.zeros([q.shape[0], BLOCK_N], tl.float32), EMULATED)
        if LOG2E_CAP > 0:
            scores = soft_cap(scores, LOG2E_CAP, row_scale[:, None])
        if MASKED:
            if TREE:
                inner = tl.minimum(tl.maximum(at - begin, 0), 63).to(tl.int64)
                node = (at < begin)[None, :] | ((at < end)[None, :] & (((bits[:, None] >> inner[None, :]) & 1) != 0))
                seen = tl.where((bits < 0)[:, None], at[None, :] <= position[:, None], node)
            else:
                seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        p, new_top, rescale = weights_of(scores, top, row_scale, LOG2E_CAP, WINDOW > 0)
        total = total * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        if MASKED:
            values = tl.load(slots + CACHE_KV, mask=inside, other=0.0)
        elif E_PAD != E:
            values = tl.load(slots + CACHE_KV, mask=(e < E)[None, :], other=0.0)
        else:
            values = tl.load(slots + CACHE_KV)
        acc = multiply(p.to(q.dtype), values.to(q.dtype), acc, EMULATED)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["few"], do_not_specialize_on_alignment=["S"])
def _flash_kernel(
    q_ptr, cache_ptr, out_ptr, table_ptr, query_start_ptr, seq_len_ptr, q_norm_ptr, cos_ptr, sin_ptr, sinks_ptr,
    kv_scales_ptr, ancestors_ptr, S, few, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, CACHE_BLOCK: tl.constexpr,
    CACHE_KV: tl.constexpr, CACHE_HEAD: tl.constexpr, CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e) without a soft cap, divided by the cap with one
    LOG2E_CAP: tl.constexpr,  # soft cap times log2(e); 0 is off
    WINDOW: tl.constexpr, H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, F: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, EMULATED: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    blocks = tl.num_programs(0) // K
    head = tl.program_id(0) % K
    block = blocks - 1 - tl.program_id(0) // K  # long rows of work first
    s = find_sequence(query_start_ptr, block, S, BLOCK_Q, BLOCK_S)
    row0 = tl.load(query_start_ptr + s)
    queries = tl.load(query_start_ptr + s + 1) - row0
    length = tl.load(seq_len_ptr + s)
    skip = (block - row0 // BLOCK_Q - s) * BLOCK_Q  # query tokens of the sequence before this block
    if (queries > few) & (skip < queries):
        m = tl.arange(0, BLOCK_M)
        e = tl.arange(0, E_PAD)
        token = skip + m // G
        valid = (m < BLOCK_Q * G) & (token < queries)
        position = length - queries + token
        row = (row0 + token).to(tl.int64)
        heads = head * G + m % G
        inside = valid[:, None] & (e < E)[None, :]
        q_row = q_ptr + (row * Q_ROW + heads * Q_HEAD)[:, None]
        in_row = valid[:, None]
        q = load_rotated(q_row, row[:, None], in_row, q_norm_ptr, cos_ptr, sin_ptr, E, E_PAD, F, NORM, EPS)
        head_ptr = cache_ptr + head * CACHE_HEAD
        k_scale, v_scale = load_scales(kv_scales_ptr, SCALED)
        q, powers = as_queries(q, cache_ptr.dtype.element_ty)
        row_scale = SCALE * k_scale * powers
        table_row = table_ptr + tl.cast(s, tl.int64) * TABLE_ROW

        begin = length - queries
        low = begin + skip  # position of the first token of the block
        end = tl.minimum(low + BLOCK_Q, length)  # one past the last
        bits = load_bits(ancestors_ptr, row, valid, TREE)
        if TREE:  # nodes may stand anywhere from the first row on, need not see it, and may see later rows
            if tl.load(ancestors_ptr + row0) >= 0:
                low = begin - 1
                end = length
                if WINDOW > 0:
                    position = tl.where(bits < 0, position, begin + count_bits(bits, 64) - 1)
        last_tile = (end + BLOCK_N - 1) // BLOCK_N
        full = (low + 1) // BLOCK_N  # tiles that end at or before low: seen by all rows, but for the window
        acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        first = 0
        if WINDOW > 0:
            first, inner = window_tiles(low, end, full, WINDOW, BLOCK_N)
            acc, top, total = _attend_tiles(
                acc, top, total, q, head_ptr, table_row, position, end, first, inner, row_scale,
                begin, bits,
                CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, TREE, True, E, E_PAD, P, BLOCK_N, EMULATED,
            )  # fmt: skip
            first = inner
        acc, top, total = _attend_tiles(
            acc, top, total, q, head_ptr, table_row, position, end, first, full, row_scale,
            begin, bits,
            CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, TREE, False, E, E_PAD, P, BLOCK_N, EMULATED,
        )  # fmt: skip
        acc, top, total = _attend_tiles(
            acc, top, total, q, head_ptr, table_row, position, end, tl.maximum(first, full), last_tile, row_scale,
            begin, bits,
            CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, TREE, True, E, E_PAD, P, BLOCK_N, EMULATED,
        )  # fmt: skip
        write_heads(acc, top, total, v_scale, sinks_ptr, out_ptr, row, heads, valid, e, inside, H, E, SINKS)


def prefill_configs(site: CallSite) -> list[Config]:
    """Launch constants of the flash kernel, the likely best first."""
    q_THE, K = site.args["q_THE"], site.args["kv_cache"].shape[2]
    G, E = q_THE.shape[1] // K, q_THE.shape[2]
    if q_THE.dtype == torch.float32:
        tiles = [(16, 32, 4, 2), (32, 32, 4, 2)]
    elif E > 128:
        tiles = [(128, 32, 8, 2), (64, 32, 4, 2)]
    else:
        tiles = [(128, 64, 8, 3), (128, 128, 8, 2)]
    return [
        {"block_m": max(block_m, power_of_2(G)), "block_n": block_n, "warps": warps, "stages": stages}
        for block_m, block_n, warps, stages in tiles
    ]


def _serves(site: CallSite) -> bool:
    """Any ragged batch; with a rotation those that `gluon_prefill` does not take, which is 1.25 times as fast and
    spares 10 s of compiling. Heads of 256 numbers are an exception: short prompts are faster here."""
    E, plain = site.args["q_THE"].shape[2], site.args["cos_TF"] is None
    return is_mixed(site) and (plain or E == 256 or not is_flash(site))


@paged_attention.impl("triton_prefill", device="cuda", supports=_serves, configs=prefill_configs, remedy=problem)
def triton_prefill(
    rows: Rows, paged: Paged, scores: Scores, kv_scales: Tensor | None, ancestors_T: Tensor | None,
    rotary: Rotary | None, *, block_m: int, block_n: int, warps: int, stages: int,
) -> Tensor:  # fmt: skip
    """Any ragged batch."""
    q_THE, k_TKE, v_TKE = rows
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    T, H, E = q_THE.shape
    kv_cache, *where = paged
    scale, window, softcap, sinks_H = scores
    K, S = kv_cache.shape[2], paged.seq_lens.shape[0]
    G = H // K
    cache = cache_constants(paged, E, kv_scales)
    (q_norm, _, cos, sin), rotation = rotary_arguments(rotary, q_THE)
    scales = q_THE if kv_scales is None else kv_scales
    write_rows(k_TKE, v_TKE, paged, kv_scales, rotary)
    score_scale, log2e_cap = score_constants(scale, softcap)
    few = plan_few(rows, paged, ancestors_T)
    launch_triton(
        _flash_kernel, ((T // (block_m // G) + S) * K,),
        q_THE, kv_cache, out_THE, *where, q_norm, cos, sin,
        q_THE if sinks_H is None else sinks_H, scales, q_THE if ancestors_T is None else ancestors_T, S, few.left_out,
        Q_ROW=q_THE.stride(0), Q_HEAD=q_THE.stride(1), SCALE=score_scale, LOG2E_CAP=log2e_cap, WINDOW=window,
        SINKS=sinks_H is not None, H=H, K=K, G=G, BLOCK_M=block_m, BLOCK_N=block_n, TREE=ancestors_T is not None,
        num_warps=warps, num_stages=stages, **cache, **rotation,
    )  # fmt: skip
    launch_few(few, rows, paged, out_THE, scores, kv_scales, ancestors_T, rotary)
    return out_THE
