"""Triton kernels for ragged batches of prefill and decode: store keys and values, then flash attention over the blocks.

A program of the flash kernel serves one block of query tokens of one sequence for one KV head, the query heads of that
KV head packed into the tile's rows. The grid has room for one partly filled block per sequence; a program finds its
sequence by comparing with query_start_loc, on the device. Sequences with a single query token go to the split-KV
kernels of triton_decode, which spread a long context over many programs.

Where each row must come out the same in every batch, the flash kernel serves single tokens as well. Contexts are then
divided into ranges that begin at multiples of RANGE, and what these give is joined in their order: by the program of
the rows, or, for single tokens, by the last of several programs that share the ranges.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102  (a branch on a constexpr joins no other condition)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.paged_attention.op import paged_attention
from graphllm.ops.paged_attention.triton_common import (
    Rotary,
    as_entries,
    as_queries,
    attends,
    count_bits,
    load_bits,
    load_rotated,
    load_scales,
    load_sinks,
    multiply,
    power_of_2,
    problem,
    rotary_arguments,
    score_constants,
    soft_cap,
    tile_blocks,
    tile_slots,
)
from graphllm.ops.paged_attention.triton_decode import Config, launch_decode, plan_splits
from graphllm.ops.paged_attention.triton_verify import is_verification

_WRITE_TOKENS = 32  # tokens whose keys and values one program stores, for one head
_RANGE, _MOST_RANGES = 1024, 16  # tokens of a range at least, and ranges of the longest context at most
_FEW_PROGRAMS = 256  # sequences times KV heads up to which several programs share a sequence's ranges


@triton.jit
def _write_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    table_ptr,
    query_start_ptr,
    seq_len_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    kv_scales_ptr,
    S,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    CACHE_KV: tl.constexpr,
    CACHE_HEAD: tl.constexpr,
    CACHE_POS: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    F: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
    EMULATED: tl.constexpr,
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.zeros([BLOCK_T], tl.int32)
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        ends = tl.load(query_start_ptr + 1 + i, mask=i < S, other=2147483647)
        s += tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
    owned = s < S  # rows beyond the last sequence are padding
    position = tl.load(seq_len_ptr + s, mask=owned, other=0) - tl.load(query_start_ptr + 1 + s, mask=owned, other=0) + t
    cache_block = tl.load(table_ptr + s.to(tl.int64) * TABLE_ROW + position // P, mask=owned, other=0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    row = t.to(tl.int64)[:, None]
    inside = owned[:, None] & (e < E)[None, :]
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    k_row = k_ptr + row * K_ROW + head * K_HEAD
    keys = load_rotated(k_row, row, owned[:, None], k_norm_ptr, cos_ptr, sin_ptr, E, E_PAD, F, NORM, EPS)
    values = tl.load(v_ptr + row * V_ROW + head * V_HEAD + e[None, :], mask=inside)
    token = cache_block * CACHE_BLOCK + (position % P) * CACHE_POS
    slots = cache_ptr + token[:, None] + (head * CACHE_HEAD + e)[None, :]
    k_scale, v_scale = load_scales(kv_scales_ptr, SCALED)
    dtype = cache_ptr.dtype.element_ty
    tl.store(slots, as_entries(keys, k_scale, dtype, SCALED, EMULATED), mask=inside)
    tl.store(slots + CACHE_KV, as_entries(values, v_scale, dtype, SCALED, EMULATED), mask=inside)


@triton.jit
def _attend_tiles(
    acc,
    top,
    total,
    q,
    head_ptr,
    table_row,
    position,
    end,
    lo,
    hi,
    row_scale,
    begin,
    bits,
    CACHE_BLOCK: tl.constexpr,
    CACHE_KV: tl.constexpr,
    CACHE_POS: tl.constexpr,
    LOG2E_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,  # rows may be nodes of a tree: from position begin on they see what their bits say
    BLIND: tl.constexpr,  # rows may see nothing of the first tiles
    MASKED: tl.constexpr,  # some rows do not see some of these tiles' tokens
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EMULATED: tl.constexpr,
):
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
        if LOG2E_CAP > 0:
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            shift = new_top
            if BLIND:
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(scores - shift[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, axis=1) * row_scale)
            shift = new_top
            if BLIND:
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(scores * row_scale[:, None] - shift[:, None])
        rescale = tl.exp2(top - shift)
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


@triton.jit
def _attend_range(
    q, head_ptr, table_row, position, end, lo, first, inner, full, hi, row_scale, begin, bits,
    CACHE_BLOCK: tl.constexpr, CACHE_KV: tl.constexpr, CACHE_POS: tl.constexpr, LOG2E_CAP: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr, BLIND: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    P: tl.constexpr, BLOCK_N: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """What tiles lo .. hi give: sums, the largest score and the sum of weights. Tiles from first up to inner, and from
    full on, are not seen whole by all rows."""
    acc = tl.zeros([q.shape[0], E_PAD], tl.float32)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    first = tl.maximum(first, lo)
    if WINDOW > 0:
        inner = tl.maximum(tl.minimum(inner, hi), first)
        acc, top, total = _attend_tiles(
            acc, top, total, q, head_ptr, table_row, position, end, first, inner, row_scale, begin, bits,
            CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, TREE, BLIND, True, E, E_PAD, P, BLOCK_N, EMULATED,
        )  # fmt: skip
        first = inner
    acc, top, total = _attend_tiles(
        acc, top, total, q, head_ptr, table_row, position, end, first, tl.minimum(full, hi), row_scale, begin, bits,
        CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, TREE, BLIND, False, E, E_PAD, P, BLOCK_N, EMULATED,
    )  # fmt: skip
    return _attend_tiles(
        acc, top, total, q, head_ptr, table_row, position, end, tl.maximum(first, full), hi, row_scale, begin, bits,
        CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, TREE, BLIND, True, E, E_PAD, P, BLOCK_N, EMULATED,
    )  # fmt: skip


@triton.jit
def _join(acc, top, total, more, more_top, more_total):
    """What ranges gave so far and what the next one does. Products are added by one instruction, named here, so that
    every place rounds alike."""
    new_top = tl.maximum(top, more_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept, added = tl.exp2(top - shift), tl.exp2(more_top - shift)
    acc = tl.fma(acc, tl.broadcast_to(kept[:, None], acc.shape), more * added[:, None])
    return acc, new_top, tl.fma(total, kept, more_total * added)


@triton.jit
def _flash_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    query_start_ptr,
    seq_len_ptr,
    q_norm_ptr,
    cos_ptr,
    sin_ptr,
    sinks_ptr,
    kv_scales_ptr,
    ancestors_ptr,
    partial_ptr,  # float32 [S, PARTS, H, E + 2]: of each range sums, largest score and sum of weights
    arrived_ptr,  # [S * K] int32, zero before and after
    S,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    CACHE_KV: tl.constexpr,
    CACHE_HEAD: tl.constexpr,
    CACHE_POS: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e) without a soft cap, divided by the cap with one
    LOG2E_CAP: tl.constexpr,  # soft cap times log2(e); 0 is off
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    F: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    EMULATED: tl.constexpr,
    TREE: tl.constexpr,
    RANGE: tl.constexpr,  # tokens of a range, whole tiles; 0: contexts are not divided, and single tokens not served
    PARTS: tl.constexpr,  # ranges of the longest context
    PROGRAMS: tl.constexpr,  # that share the ranges of a single token
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    blocks = tl.num_programs(0) // K
    head = tl.program_id(0) % K
    block = blocks - 1 - tl.program_id(0) // K  # long rows of work first
    s = -1
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        first_block = tl.load(query_start_ptr + i, mask=i < S, other=2147483647) // BLOCK_Q + i
        s += tl.sum(((first_block <= block) & (i < S)).to(tl.int32))
    row0 = tl.load(query_start_ptr + s)
    queries = tl.load(query_start_ptr + s + 1) - row0
    length = tl.load(seq_len_ptr + s)
    skip = (block - row0 // BLOCK_Q - s) * BLOCK_Q  # query tokens of the sequence before this block
    LEAST: tl.constexpr = 1 if RANGE else 2
    if (queries >= LEAST) & (skip < queries) & ((queries == 1) | (tl.program_id(1) == 0)):
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
        if TREE:  # nodes may stand anywhere from the first row on, need not see it, and may see rows behind
            if tl.load(ancestors_ptr + row0) >= 0:
                low = begin - 1
                end = length
                if WINDOW > 0:
                    position = tl.where(bits < 0, position, begin + count_bits(bits, 64) - 1)
        last_tile = (end + BLOCK_N - 1) // BLOCK_N
        full = (low + 1) // BLOCK_N  # tiles that end at or before low: seen by all rows, but for the window
        first = begin * 0
        inner = first
        if WINDOW > 0:
            first = tl.maximum(low - WINDOW + 1, 0) // BLOCK_N
            whole = tl.maximum(end - WINDOW, 0)  # first position that the last row sees
            inner = tl.maximum(tl.minimum((whole + BLOCK_N - 1) // BLOCK_N, full), first)
        if RANGE == 0:
            acc, top, total = _attend_range(
                q, head_ptr, table_row, position, end, first, first, inner, full, last_tile, row_scale, begin, bits,
                CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, TREE, WINDOW > 0, E, E_PAD, P, BLOCK_N, EMULATED,
            )  # fmt: skip
            finishes = True
        else:
            TILES: tl.constexpr = RANGE // BLOCK_N
            range_0 = first // TILES
            ranges = (last_tile + TILES - 1) // TILES - range_0
            shared = (PROGRAMS > 1) & (queries == 1) & (ranges > 1)
            own = tl.where(shared, tl.program_id(1), 0)
            step = tl.where(shared, PROGRAMS, 1)
            finishes = (not shared) & (tl.program_id(1) == 0)
            acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            cell = partial_ptr + ((tl.cast(s, tl.int64) * PARTS * H + heads) * (E + 2))[:, None] + e[None, :]
            edge = partial_ptr + (tl.cast(s, tl.int64) * PARTS * H + heads) * (E + 2) + E
            if shared | finishes:
                for r in range(own, ranges, step):
                    lo = (range_0 + r) * TILES
                    more, more_top, more_total = _attend_range(
                        q, head_ptr, table_row, position, end, lo, first, inner, full,
                        tl.minimum(lo + TILES, last_tile), row_scale, begin, bits,
                        CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, TREE, True, E, E_PAD, P, BLOCK_N, EMULATED,
                    )  # fmt: skip
                    if shared:
                        tl.store(cell + r * (H * (E + 2)), more, mask=inside)
                        tl.store(edge + r * (H * (E + 2)), more_top, mask=valid)
                        tl.store(edge + r * (H * (E + 2)) + 1, more_total, mask=valid)
                    else:
                        acc, top, total = _join(acc, top, total, more, more_top, more_total)
            if shared & (own < ranges):
                tl.debug_barrier()
                arrived = arrived_ptr + s * K + head
                before = tl.atomic_add(arrived, 1, sem="acq_rel")
                if before == tl.minimum(ranges, PROGRAMS) - 1:
                    tl.store(arrived, 0)
                    for r in range(ranges):
                        at = r * (H * (E + 2))
                        more = tl.load(cell + at, mask=inside, other=0.0, cache_modifier=".cg")
                        more_top = tl.load(edge + at, mask=valid, other=0.0, cache_modifier=".cg")
                        more_total = tl.load(edge + at + 1, mask=valid, other=1.0, cache_modifier=".cg")
                        acc, top, total = _join(acc, top, total, more, more_top, more_total)
                    finishes = True
        if finishes:
            if SINKS:
                total += tl.exp2(load_sinks(sinks_ptr, heads, valid) - top)
            acc = acc * (v_scale / total)[:, None]
            out = out_ptr + ((row * H + heads) * E)[:, None] + e[None, :]
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside)


def _cache_constants(kv_cache: Tensor, block_table: Tensor, E: int, kv_scales: Tensor | None) -> dict[str, Any]:
    """What both kernels are told of the cache."""
    return {
        "CACHE_BLOCK": kv_cache.stride(0), "CACHE_KV": kv_cache.stride(1), "CACHE_HEAD": kv_cache.stride(2),
        "CACHE_POS": kv_cache.stride(3), "TABLE_ROW": block_table.stride(0), "E": E, "E_PAD": power_of_2(E),
        "P": kv_cache.shape[3], "BLOCK_S": 128, "SCALED": kv_scales is not None,
        "EMULATED": triton.knobs.runtime.interpret,
    }  # fmt: skip


def write_rows(
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_scales: Tensor | None,
    rotary: Rotary | None,
) -> None:
    """Keys and values of the step's tokens go to the cache. rotary: for `rope_attention`."""
    T, K, E = k_TKE.shape
    (_, k_norm, cos, sin), rotation = rotary_arguments(rotary, k_TKE)
    launch_triton(
        _write_kernel, (K, (T + _WRITE_TOKENS - 1) // _WRITE_TOKENS),
        k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, k_norm, cos, sin,
        k_TKE if kv_scales is None else kv_scales, seq_lens.shape[0],
        K_ROW=k_TKE.stride(0), K_HEAD=k_TKE.stride(1), V_ROW=v_TKE.stride(0), V_HEAD=v_TKE.stride(1),
        BLOCK_T=_WRITE_TOKENS, num_warps=4, **_cache_constants(kv_cache, block_table, E, kv_scales), **rotation,
    )  # fmt: skip


def prefill_configs(site: CallSite) -> list[Config]:
    """Launch constants of the flash kernel, the likely best first."""
    q_THE, K = site.args["q_THE"], site.args["kv_cache"].shape[2]
    G, E = q_THE.shape[1] // K, q_THE.shape[2]
    if site.deterministic:
        return [_range_config(site, K, G)]
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


def _range_config(site: CallSite, K: int, G: int) -> Config:
    """The same tiles and ranges at all sizes. Where sequences are few, some programs share the ranges of each."""
    q_THE, table, P = site.args["q_THE"], site.args["block_table"], site.args["kv_cache"].shape[3]
    small = q_THE.dtype == torch.float32 or q_THE.shape[2] > 128
    length = max(_RANGE, power_of_2(-(-table.shape[1] * P // _MOST_RANGES)))
    parts = -(-table.shape[1] * P // length)
    few = site.bucket.kind == "decode" and site.bucket.hi * K <= _FEW_PROGRAMS
    return {
        "block_m": max(16 if q_THE.dtype == torch.float32 else 64, power_of_2(G)), "block_n": 32 if small else 64,
        "warps": 4, "stages": 2, "length": length, "parts": parts, "programs": min(parts, 16) if few else 1,
    }  # fmt: skip


def range_order(site: CallSite, constants: Config) -> str:
    """`Impl.row_order`: what a row's sums depend on."""
    return ", ".join(f"{name} {constants[name]}" for name in ("block_m", "block_n", "warps", "length"))


def is_mixed(site: CallSite) -> bool:
    """Whether these kernels serve the site; steps of one token or few of each sequence have their own, unless rows must
    come out the same in all of them."""
    if site.deterministic:
        return site.bucket.query_len == 1 and attends(site)
    few = is_verification(site)
    return (site.bucket.kind == "mixed" or site.bucket.query_len > 1) and not few and attends(site)


@paged_attention.impl(
    "triton_prefill", device="cuda", supports=is_mixed, configs=prefill_configs, row_order=range_order, remedy=problem
)
def triton_prefill(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    kv_scales: Tensor | None = None,
    ancestors_T: Tensor | None = None,
    rotary: Rotary | None = None,
    *,
    block_m: int,
    block_n: int,
    warps: int,
    stages: int,
    length: int = 0,
    parts: int = 1,
    programs: int = 1,
) -> Tensor:
    """Any ragged batch. rotary: for `rope_attention`. length: of the ranges into which contexts are divided, 0 where
    they are not; at most so many parts, which so many programs share where a sequence has one token."""
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    T, H, E = q_THE.shape
    K, P, S = kv_cache.shape[2], kv_cache.shape[3], seq_lens.shape[0]
    G = H // K
    cache = _cache_constants(kv_cache, block_table, E, kv_scales)
    (q_norm, _, cos, sin), rotation = rotary_arguments(rotary, q_THE)
    scales = q_THE if kv_scales is None else kv_scales
    write_rows(k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, kv_scales, rotary)
    score_scale, log2e_cap = score_constants(scale, softcap)
    partial = q_THE
    if programs > 1:
        partial = torch.empty((S, parts, H, E + 2), dtype=torch.float32, device=q_THE.device)
    launch_triton(
        _flash_kernel, ((T // (block_m // G) + S) * K, programs),
        q_THE, kv_cache, out_THE, block_table, query_start_loc, seq_lens, q_norm, cos, sin,
        q_THE if sinks_H is None else sinks_H, scales, q_THE if ancestors_T is None else ancestors_T,
        partial, zeroed(q_THE, S * K) if programs > 1 else q_THE, S,
        Q_ROW=q_THE.stride(0), Q_HEAD=q_THE.stride(1), SCALE=score_scale, LOG2E_CAP=log2e_cap, WINDOW=window,
        SINKS=sinks_H is not None, H=H, K=K, G=G, BLOCK_M=block_m, BLOCK_N=block_n, TREE=ancestors_T is not None,
        RANGE=length, PARTS=parts, PROGRAMS=programs, num_warps=warps, num_stages=stages, **cache, **rotation,
    )  # fmt: skip
    if length:
        return out_THE
    launch_decode(
        q_THE, k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, out_THE, scale, window, softcap, sinks_H,
        kv_scales, rotary, write=False, **plan_splits(0, H, K, block_table.shape[1] * P, q_THE.dtype, E),
    )  # fmt: skip
    return out_THE
