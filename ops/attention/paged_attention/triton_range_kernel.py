"""Triton: the kernel of attention with rows that come out bitwise the same in every batch, however prompts are divided.

Contexts are divided into ranges of RANGE tokens that begin at multiples of that, and ranges into tiles. A row takes the
tiles of a range in their order, and joins what the ranges give in theirs; a tile or range that it sees nothing of
changes nothing. Single tokens and prompts go by one kernel: it has the query heads of a KV head in the rows of its
tile, for one token or for many. Where sequences are few and have one token each, some programs share the ranges of a
sequence, and the last one to finish joins them; else one program does both.

Keys and values of prompts are first stored in the cache by a kernel of their own, and read from there as all others.
Where sequences have one token each, the program of the last range stores its keys and values, and takes them as they
are. In steps with prompts such sequences have a launch of their own, in which they do not fill tiles of many rows.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102  (a branch on a constexpr joins no other condition)

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.attention.paged_attention.operands import Paged, Rotary, Rows, Scores
from graphllm.ops.attention.paged_attention.triton_common import (
    as_entries,
    as_queries,
    attends,
    find_sequence,
    load_rotated,
    load_scales,
    multiply,
    prefetch_lines,
    rotary_arguments,
    score_constants,
    soft_cap,
    tile_blocks,
    tile_slots,
    weights_of,
    window_tiles,
    write_heads,
)
from graphllm.ops.attention.paged_attention.triton_write import cache_constants, head_strides

RANGE = 256  # tokens of a range
PROMPT_ROWS = 128  # of a tile for prompts
SINGLE = {"block_m": 64, "warps": 4, "stages": 2}  # for single tokens: rows of a tile are the heads of one KV head


@triton.jit
def _join(acc, top, total, more, more_top, more_total):
    """What ranges gave so far and what the next one gives. Products are added by one instruction, named here, so that
    every place rounds alike."""
    new_top = tl.maximum(top, more_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept, added = tl.exp2(top - shift), tl.exp2(more_top - shift)
    acc = tl.fma(acc, tl.broadcast_to(kept[:, None], acc.shape), more * added[:, None])
    return acc, new_top, tl.fma(total, kept, more_total * added)


@triton.jit
def _attend(
    acc, top, total, joined, joined_top, joined_total, q, head_ptr, table_row, position, end, lo, hi, row_scale, k_new,
    v_new, CACHE_BLOCK: tl.constexpr, CACHE_KV: tl.constexpr, CACHE_POS: tl.constexpr, LOG2E_CAP: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr, RANGE: tl.constexpr, SINGLE: tl.constexpr, SEVERAL: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Tiles lo .. hi. MASKED: some rows do not see some of their tokens. SINGLE: the last token, before end, is not in
    the cache: its entries are k_new and v_new [E_PAD]. SEVERAL: tiles may be of more than one range."""
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, E_PAD)
    TILES: tl.constexpr = RANGE // BLOCK_N
    cache_block = tile_blocks(table_row, lo, end, P, BLOCK_N)
    for tile in range(lo, hi):
        at = tile * BLOCK_N + n
        slots = head_ptr + tile_slots(cache_block, tile, CACHE_BLOCK, CACHE_POS, P, BLOCK_N)[:, None] + e[None, :]
        cache_block = tile_blocks(table_row, tile + 1, end, P, BLOCK_N)
        if MASKED:
            kept = at < end - 1 if SINGLE else at < end
            if WINDOW > 0:  # of what no row sees the block may be gone, and 0 * NaN is NaN
                kept = kept & (at > tl.min(position, axis=0) - WINDOW)
            inside = kept[:, None] & (e < E)[None, :]
            keys = tl.load(slots, mask=inside, other=0.0)
            values = tl.load(slots + CACHE_KV, mask=inside, other=0.0)
            if SINGLE:
                is_new = (at == end - 1)[:, None]
                keys = tl.where(is_new, k_new[None, :], keys)
                values = tl.where(is_new, v_new[None, :], values)
        elif E_PAD != E:
            keys = tl.load(slots, mask=(e < E)[None, :], other=0.0)
            values = tl.load(slots + CACHE_KV, mask=(e < E)[None, :], other=0.0)
        else:
            keys = tl.load(slots)
            values = tl.load(slots + CACHE_KV)
        scores = multiply(q, tl.trans(keys.to(q.dtype)), tl.zeros([q.shape[0], BLOCK_N], tl.float32), EMULATED)
        if LOG2E_CAP > 0:
            scores = soft_cap(scores, LOG2E_CAP, row_scale[:, None])
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        p, new_top, rescale = weights_of(scores, top, row_scale, LOG2E_CAP, True)
        total = tl.fma(total, rescale, tl.sum(p, axis=1))
        acc = multiply(p.to(q.dtype), values.to(q.dtype), acc * rescale[:, None], EMULATED)
        top = new_top
        if SEVERAL:
            if (tile + 1) % TILES == 0:
                joined, joined_top, joined_total = _join(joined, joined_top, joined_total, acc, top, total)
                acc = tl.zeros(acc.shape, tl.float32)
                top = tl.full(top.shape, float("-inf"), tl.float32)
                total = tl.zeros(total.shape, tl.float32)
    return acc, top, total, joined, joined_top, joined_total


@triton.jit
def _attend_all(
    q, head_ptr, table_row, position, end, first, inner, full, last, row_scale, k_new, v_new,
    CACHE_BLOCK: tl.constexpr, CACHE_KV: tl.constexpr, CACHE_POS: tl.constexpr, LOG2E_CAP: tl.constexpr,
    WINDOW: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr, SINGLE: tl.constexpr, SEVERAL: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """What tiles first .. last give: sums, the largest score and the sum of weights. Tiles inner .. full are seen whole
    by all rows."""
    acc = tl.zeros([q.shape[0], E_PAD], tl.float32)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    joined, joined_top, joined_total = acc, top, total
    if WINDOW > 0:
        acc, top, total, joined, joined_top, joined_total = _attend(
            acc, top, total, joined, joined_top, joined_total, q, head_ptr, table_row, position, end, first, inner,
            row_scale, k_new, v_new, CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, True, E, E_PAD, P, BLOCK_N,
            RANGE, SINGLE, SEVERAL, EMULATED,
        )  # fmt: skip
    acc, top, total, joined, joined_top, joined_total = _attend(
        acc, top, total, joined, joined_top, joined_total, q, head_ptr, table_row, position, end, inner, full,
        row_scale, k_new, v_new, CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, False, E, E_PAD, P, BLOCK_N,
        RANGE, SINGLE, SEVERAL, EMULATED,
    )  # fmt: skip
    acc, top, total, joined, joined_top, joined_total = _attend(
        acc, top, total, joined, joined_top, joined_total, q, head_ptr, table_row, position, end, full, last,
        row_scale, k_new, v_new, CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, True, E, E_PAD, P, BLOCK_N,
        RANGE, SINGLE, SEVERAL, EMULATED,
    )  # fmt: skip
    if SEVERAL:
        acc, top, total = _join(joined, joined_top, joined_total, acc, top, total)
    return acc, top, total


@triton.jit(do_not_specialize_on_alignment=["S"])
def range_kernel(
    q_ptr,
    k_ptr,  # these two if SINGLE
    v_ptr, cache_ptr, out_ptr, table_ptr, query_start_ptr, seq_len_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    sinks_ptr, kv_scales_ptr,
    partial_ptr,  # float32 [S, PARTS, H, E + 2]: of each range sums, largest score and sum of weights
    arrived_ptr,  # [S * K] int32, zero before and after
    S, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr, CACHE_BLOCK: tl.constexpr, CACHE_KV: tl.constexpr, CACHE_HEAD: tl.constexpr,
    CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e) without a soft cap, divided by the cap with one
    LOG2E_CAP: tl.constexpr,  # soft cap times log2(e); 0 is off
    WINDOW: tl.constexpr, H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, F: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, EMULATED: tl.constexpr,
    RANGE: tl.constexpr,
    SINGLE: tl.constexpr,  # sequences that have one token, and no others; else all the others
    PARTS: tl.constexpr,  # ranges of the longest context
    PROGRAMS: tl.constexpr,  # that share the ranges of a sequence, if SINGLE
    LINE: tl.constexpr,  # entries in 128 bytes, a line of the cache
    LINES: tl.constexpr,  # such lines that a head's entries surely fill
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    head = tl.program_id(0) % K
    if SINGLE:
        s = tl.program_id(0) // K
        skip = 0
        row0 = tl.load(query_start_ptr + s)
    else:
        block = tl.num_programs(0) // K - 1 - tl.program_id(0) // K  # long rows of work first
        s = find_sequence(query_start_ptr, block, S, BLOCK_Q, BLOCK_S)
        row0 = tl.load(query_start_ptr + s)
        skip = (block - row0 // BLOCK_Q - s) * BLOCK_Q  # query tokens of the sequence before this block
    queries = tl.load(query_start_ptr + s + 1) - row0
    length = tl.load(seq_len_ptr + s)
    low = length - queries + skip  # position of the first token of the block
    end = tl.minimum(low + BLOCK_Q, length)  # one past the last
    last = (end + BLOCK_N - 1) // BLOCK_N
    full = (low + 1) // BLOCK_N  # tiles that end at or before low: seen by all rows, but for the window
    if SINGLE:
        full = low // BLOCK_N
    first = full * 0
    inner = first
    if WINDOW > 0:
        first, inner = window_tiles(low, end, full, WINDOW, BLOCK_N)
    full = tl.maximum(full, inner)
    TILES: tl.constexpr = RANGE // BLOCK_N
    range_0 = first // TILES
    ranges = (last + TILES - 1) // TILES - range_0
    own = tl.program_id(1)
    head_ptr = cache_ptr + head * CACHE_HEAD
    table_row = table_ptr + tl.cast(s, tl.int64) * TABLE_ROW
    if not EMULATED:
        if SINGLE:  # the first tile is on its way while the queries are still being made
            if own < ranges:
                begin = tl.maximum((range_0 + own) * TILES, first)
                blocks = tile_blocks(table_row, begin, low, P, BLOCK_N)
                slots = tile_slots(blocks, begin, CACHE_BLOCK, CACHE_POS, P, BLOCK_N)
                prefetch_lines(head_ptr + slots, CACHE_KV, LINE, LINES)
        tl.extra.cuda.gdc_wait()
    served = queries == 1 if SINGLE else (queries > 1) & (skip < queries)
    if served & (own < ranges):
        m = tl.arange(0, BLOCK_M)
        e = tl.arange(0, E_PAD)
        token = skip + m // G
        valid = (m < BLOCK_Q * G) & (token < queries)
        position = length - queries + token
        row = (row0 + token).to(tl.int64)
        heads = head * G + m % G
        inside = valid[:, None] & (e < E)[None, :]
        q_row = q_ptr + (row * Q_ROW + heads * Q_HEAD)[:, None]
        q = load_rotated(q_row, row[:, None], valid[:, None], q_norm_ptr, cos_ptr, sin_ptr, E, E_PAD, F, NORM, EPS)
        k_scale, v_scale = load_scales(kv_scales_ptr, SCALED)
        q, powers = as_queries(q, cache_ptr.dtype.element_ty)
        row_scale = SCALE * k_scale * powers
        k_new, v_new = 0.0, 0.0
        if SINGLE:
            # As the kernel does that stores prompts, by rows of as many numbers of a thread: each is the one token.
            r = tl.arange(0, 16)[:, None]
            row64 = row0.to(tl.int64)
            dtype: tl.constexpr = cache_ptr.dtype.element_ty
            k_row = k_ptr + row64 * K_ROW + head * K_HEAD + r * 0
            keys = load_rotated(k_row, row64 + r * 0, r >= 0, k_norm_ptr, cos_ptr, sin_ptr, E, E_PAD, F, NORM, EPS)
            in_row = (r >= 0) & (e < E)[None, :]
            values = tl.load(v_ptr + row64 * V_ROW + head * V_HEAD + r * 0 + e[None, :], mask=in_row, other=0.0)
            keys = as_entries(keys, k_scale, dtype, SCALED, EMULATED)
            values = as_entries(values, v_scale, dtype, SCALED, EMULATED)
            slot = tl.load(table_row + low // P).to(tl.int64) * CACHE_BLOCK + (low % P) * CACHE_POS
            stores = (r == 0) & (e < tl.where(own == (ranges - 1) % PROGRAMS, E, 0))[None, :]
            tl.store(head_ptr + slot + r * 0 + e[None, :], keys, mask=stores)
            tl.store(head_ptr + slot + r * 0 + e[None, :] + CACHE_KV, values, mask=stores)
            k_new = tl.max(keys.to(tl.float32), axis=0).to(dtype)
            v_new = tl.max(values.to(tl.float32), axis=0).to(dtype)
        finishes = True
        if PROGRAMS == 1:
            acc, top, total = _attend_all(
                q, head_ptr, table_row, position, end, first, inner, full, last, row_scale, k_new, v_new,
                CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, E, E_PAD, P, BLOCK_N, RANGE, SINGLE, True,
                EMULATED,
            )  # fmt: skip
        else:
            CELL: tl.constexpr = E + 2
            cell = partial_ptr + ((tl.cast(s, tl.int64) * PARTS * H + heads) * CELL)[:, None] + e[None, :]
            edge = partial_ptr + (tl.cast(s, tl.int64) * PARTS * H + heads) * CELL + E
            acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for r in range(own, ranges, PROGRAMS):
                lo = (range_0 + r) * TILES
                hi = tl.minimum(lo + TILES, last)
                lo = tl.maximum(lo, first)
                begin = tl.minimum(tl.maximum(inner, lo), hi)
                acc, top, total = _attend_all(
                    q, head_ptr, table_row, position, end, lo, begin, tl.minimum(tl.maximum(full, begin), hi), hi,
                    row_scale, k_new, v_new, CACHE_BLOCK, CACHE_KV, CACHE_POS, LOG2E_CAP, WINDOW, E, E_PAD, P, BLOCK_N,
                    RANGE, SINGLE, False, EMULATED,
                )  # fmt: skip
                if ranges > 1:
                    tl.store(cell + r * (H * CELL), acc, mask=inside)
                    tl.store(edge + r * (H * CELL), top, mask=valid)
                    tl.store(edge + r * (H * CELL) + 1, total, mask=valid)
            if ranges > 1:
                tl.debug_barrier()
                arrived = arrived_ptr + s * K + head
                finishes = tl.atomic_add(arrived, 1, sem="acq_rel") == tl.minimum(ranges, PROGRAMS) - 1
                if finishes:
                    tl.store(arrived, 0)
                    acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
                    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK_M], tl.float32)
                    for r in range(ranges):
                        at = r * (H * CELL)
                        more = tl.load(cell + at, mask=inside, other=0.0, cache_modifier=".cg")
                        more_top = tl.load(edge + at, mask=valid, other=0.0, cache_modifier=".cg")
                        more_total = tl.load(edge + at + 1, mask=valid, other=1.0, cache_modifier=".cg")
                        acc, top, total = _join(acc, top, total, more, more_top, more_total)
        if finishes:
            write_heads(acc, top, total, v_scale, sinks_ptr, out_ptr, row, heads, valid, e, inside, H, E, SINKS)


def in_ranges(site: CallSite) -> bool:
    """Whether the kernel serves a site: where rows are to come out the same in every batch, without drafts, by those
    instructions of Hopper's tensor cores that take 64 rows. All else has not been shown to."""
    (_, H, E), cache = site.args["q_THE"].shape, site.args["kv_cache"]
    single = site.bucket.query_len == 1 and site.args.get("ancestors_T") is None
    shown = site.args["q_THE"].dtype == cache.dtype == torch.bfloat16 and E <= 128
    fits = H // cache.shape[2] <= SINGLE["block_m"]
    return site.deterministic and site.target.arch[0] == "sm_90" and single and shown and fits and attends(site)


def range_order(site: CallSite, constants: Mapping[str, int]) -> str:
    """`Impl.row_order`: what a row's sums depend on."""
    return f"ranges of {constants['length']}, tiles of {constants['block_n']}"


def launch_ranges(
    rows: Rows, paged: Paged, out_THE: Tensor, scores: Scores, kv_scales: Tensor | None, rotary: Rotary | None, *,
    block_m: int, block_n: int, warps: int, stages: int, length: int, parts: int = 1, programs: int = 1, single: bool,
) -> None:  # fmt: skip
    """Attention of the sequences that have one token, or of all others; their keys and values are in the cache then."""
    q_THE, (T, H, E) = rows.q_THE, rows.q_THE.shape
    kv_cache, *where = paged
    K, S = kv_cache.shape[2], paged.seq_lens.shape[0]
    rotated, rotation = rotary_arguments(rotary, q_THE)
    score_scale, log2e_cap = score_constants(scores.scale, scores.softcap)
    line = 128 // kv_cache.element_size()
    partial = arrived = q_THE
    if programs > 1:
        partial = torch.empty((S, parts, H, E + 2), dtype=torch.float32, device=q_THE.device)
        arrived = zeroed(q_THE, S * K)
    items = S if single else T // (block_m // (H // K)) + S
    launch_triton(
        range_kernel, (items * K, programs),
        *rows, kv_cache, out_THE, *where, *rotated,
        q_THE if scores.sinks_H is None else scores.sinks_H, q_THE if kv_scales is None else kv_scales,
        partial, arrived, S,
        **head_strides(rows), SCALE=score_scale, LOG2E_CAP=log2e_cap, WINDOW=scores.window,
        SINKS=scores.sinks_H is not None, H=H, K=K, G=H // K, BLOCK_M=block_m, BLOCK_N=block_n, RANGE=length,
        SINGLE=single, PARTS=parts, PROGRAMS=programs, LINE=line, LINES=1 << (max(1, E // line).bit_length() - 1),
        num_warps=warps, num_stages=stages, **cache_constants(paged, E, kv_scales), **rotation,
    )  # fmt: skip
