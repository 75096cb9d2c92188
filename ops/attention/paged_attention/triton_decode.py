"""Triton kernels for steps in which a sequence has at most one query token: split-KV decode with packed query groups.

One program attends for one sequence, one range of the context and one or more KV heads: all of their query heads are
packed into the rows of a tile, the heads' keys into its columns, and scores between different heads are masked. The
number of ranges follows from the number of sequences of a launch, as a size of the grid; the ranges follow from
seq_lens on the device, so a captured launch serves every length. The step's own token is taken from k and v directly,
by the program of range 0, which also stores it into the cache: no program reads a position that another one writes. The
last program of a sequence and its heads to finish joins the ranges, always in the same order.

Queries and keys may come as projected: they are then normalized and rotated on the way in (`Rotary`). Programs start
while the kernel before theirs still runs; only what no kernel of the step writes is touched before `gdc_wait`.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM108  (a branch on a constexpr is not a conditional expression)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.attention.paged_attention.op import paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rotary, Rows, Scores
from graphllm.ops.attention.paged_attention.triton_common import (
    as_entries,
    as_queries,
    attends,
    load_angles,
    load_heads,
    load_norm,
    load_scales,
    load_sinks,
    plus_tile,
    power_of_2,
    prefetch_lines,
    problem,
    rotary_arguments,
    rotate,
    score_constants,
    scores_of,
    soft_cap,
    tile_blocks,
    tile_slots,
    tile_tokens,
)
from graphllm.ops.attention.paged_attention.triton_write import head_strides

Config = Mapping[str, int]
_JOINED = 8192  # float32 values of the ranges that a program holds at once
FEW_RANGES = 8
_PROGRAMS = 512  # that a batch of few sequences is divided among
_MOST_RANGES, _LONG = 32, 256  # in such a batch, and least tokens of a range


@triton.jit
def split_bounds(
    length, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    LONG_TILES: tl.constexpr,
):  # fmt: skip
    """What decode reads of the cache (not the new token): first position, first tile, tiles, tiles per range.

    There are at most ``splits`` ranges; more than SPLITS only if these have LONG_TILES."""
    last = length - 1
    start = last * 0
    if WINDOW > 0:
        start = tl.maximum(length - WINDOW, 0)
    first = start // BLOCK_N
    tiles = tl.where(last > start, (last + BLOCK_N - 1) // BLOCK_N - first, 0)
    per_split = tl.maximum((tiles + SPLITS - 1) // SPLITS, MIN_TILES)
    if LONG_TILES > 0:
        per_split = tl.maximum(tl.minimum(per_split, LONG_TILES), (tiles + splits - 1) // splits)
    return start, first, tiles, per_split


@triton.jit
def join_as_last(
    arrived_ptr, partial_ptr, lse_ptr, out_ptr, base, splits, tiles, per_split, row, group, rows,
    H: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    RANGES: tl.constexpr, FEW: tl.constexpr, JOINED: tl.constexpr, FEW_JOINED: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Join the ranges of a program's rows if all the others have arrived; see `_join_ranges`."""
    tl.debug_barrier()
    ranges = (tiles + per_split - 1) // per_split
    before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    if before == ranges - 1:
        tl.store(arrived_ptr, 0)
        if TURNS:
            _join_ranges(partial_ptr, lse_ptr, out_ptr, base, splits, ranges, row, group, rows,
                         H, ROWS, HEADS, E, E_PAD, FEW, JOINED, True)  # fmt: skip
        elif RANGES <= FEW:
            _join_ranges(partial_ptr, lse_ptr, out_ptr, base, splits, ranges, row, group, rows,
                         H, ROWS, HEADS, E, E_PAD, RANGES, JOINED, False)  # fmt: skip
        elif ranges <= FEW:  # loads that are masked off take time too
            _join_ranges(partial_ptr, lse_ptr, out_ptr, base, splits, ranges, row, group, rows,
                         H, ROWS, HEADS, E, E_PAD, FEW, FEW_JOINED, False)  # fmt: skip
        else:
            _join_ranges(partial_ptr, lse_ptr, out_ptr, base, splits, ranges, row, group, rows,
                         H, ROWS, HEADS, E, E_PAD, RANGES, JOINED, False)  # fmt: skip


@triton.jit
def _join_ranges(
    partial_ptr, lse_ptr, out_ptr, base, splits, ranges, row, group, rows,
    H: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    RANGES: tl.constexpr, JOINED: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """The output of a program's rows, which are HEADS query heads of each of its tokens, from their ranges.

    RANGES of JOINED rows are read at once, because a loop over ranges or rows waits for memory in each turn. TURNS:
    there may be more ranges. rows: those that there are, of ROWS."""
    e = tl.arange(0, E_PAD)
    in_e = e < E
    for i in tl.static_range(0, ROWS, JOINED):
        some = i + tl.arange(0, JOINED)
        head, query = some, 0
        if ROWS > HEADS:
            head, query = some % HEADS, some // HEADS
        part = tl.arange(0, RANGES)[:, None]
        known = (part < ranges) & (some < rows)[None, :]
        at = (base + (query * splits + part)) * H + group * HEADS + head[None, :]
        parts, lse = _load_ranges(partial_ptr, lse_ptr, at, known, e, E, E_PAD)
        most = tl.max(lse, axis=0)
        weight = tl.where(known, tl.exp2(lse - most[None, :]), 0.0)
        joined = tl.sum(parts * weight[:, :, None], axis=0)
        total = tl.sum(weight, axis=0)
        if TURNS:
            for turn in range(RANGES, ranges, RANGES):
                known = (turn + part < ranges) & (some < rows)[None, :]
                parts, lse = _load_ranges(partial_ptr, lse_ptr, at + turn * H, known, e, E, E_PAD)
                new = tl.maximum(most, tl.max(lse, axis=0))
                weight = tl.where(known, tl.exp2(lse - new[None, :]), 0.0)
                rescale = tl.where(some < rows, tl.exp2(most - new), 0.0)
                joined = joined * rescale[:, None] + tl.sum(parts * weight[:, :, None], axis=0)
                total = total * rescale + tl.sum(weight, axis=0)
                most = new
        out = out_ptr + ((row + query) * H + group * HEADS + head)[:, None] * E + e[None, :]
        joined = (joined / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out, joined, mask=(some < rows)[:, None] & in_e[None, :])


@triton.jit
def _load_ranges(partial_ptr, lse_ptr, at, known, e, E: tl.constexpr, E_PAD: tl.constexpr):
    cell = partial_ptr + at[:, :, None] * E + e[None, None, :]
    mask = known[:, :, None] & (e < E)[None, None, :]
    parts = tl.load(cell, mask=mask, other=0.0, cache_modifier=".cg")
    return parts, tl.load(lse_ptr + at, mask=known, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def load_tile(
    head_ptr, cache_block, tile, start, last,
    CACHE_BLOCK: tl.constexpr, CACHE_KV: tl.constexpr, CACHE_HEAD: tl.constexpr, CACHE_POS: tl.constexpr,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile as they are in the cache, and which of its columns attention sees."""
    e = tl.arange(0, E_PAD)
    at = tile * (BLOCK_N // HEADS) + tile_tokens(BLOCK_N, HEADS)
    seen = at < last
    if WINDOW > 0:
        seen = seen & (at >= start)
    columns = tile_slots(cache_block, tile, CACHE_BLOCK, CACHE_POS, P, BLOCK_N, CACHE_HEAD, HEADS)
    slots = head_ptr + columns[:, None] + e[None, :]
    if E_PAD == E:
        inside = seen[:, None]
    else:
        inside = seen[:, None] & (e < E)[None, :]
    keys = tl.load(slots, mask=inside, other=0.0)
    return keys, tl.load(slots + CACHE_KV, mask=inside, other=0.0), seen


@triton.jit
def _attend(
    q, keys, values, seen, row_scale, top, total, acc,
    G: tl.constexpr, HEADS: tl.constexpr, G_PAD: tl.constexpr, BLOCK_N: tl.constexpr, LOG2E_CAP: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """The running softmax with one more tile."""
    keys, values = keys.to(q.dtype), values.to(q.dtype)
    scores = scores_of(q, keys, row_scale, LOG2E_CAP, EMULATED)
    counts = seen[None, :]
    if HEADS > 1:  # rows beyond the last head's see what its rows see
        g, n = tl.arange(0, G_PAD), tl.arange(0, BLOCK_N)
        counts = counts & (tl.minimum(g // G, HEADS - 1)[:, None] == (n // (BLOCK_N // HEADS))[None, :])
    scores = tl.where(counts, scores, float("-inf"))
    return plus_tile(scores, values, top, total, acc, False, EMULATED)


@triton.jit
def _split_kernel(
    q_ptr, k_ptr, v_ptr, cache_ptr, out_ptr, partial_ptr, lse_ptr,
    arrived_ptr,  # [S * GROUPS] int32, zero before and after
    table_ptr, query_start_ptr, seq_len_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, sinks_ptr, kv_scales_ptr,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr, CACHE_BLOCK: tl.constexpr, CACHE_KV: tl.constexpr, CACHE_HEAD: tl.constexpr,
    CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e) without a soft cap, divided by the cap with one
    LOG2E_CAP: tl.constexpr,  # soft cap times log2(e); 0 is off
    WINDOW: tl.constexpr,
    WRITE: tl.constexpr,  # store k and v into the cache (else the cache holds them already)
    H: tl.constexpr,
    G: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # KV heads of a program
    GROUPS: tl.constexpr,  # programs for all KV heads
    G_PAD: tl.constexpr,  # rows of a tile: at least HEADS * G
    E: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr,
    SPLITS: tl.constexpr,  # see `split_bounds`
    RANGES: tl.constexpr,  # of a sequence at most, a power of two
    FEW: tl.constexpr, MIN_TILES: tl.constexpr, LONG_TILES: tl.constexpr, BLOCK_N: tl.constexpr,
    LINE: tl.constexpr,  # entries in 128 bytes, a line of the cache
    LINES: tl.constexpr,  # such lines that a head's entries surely fill
    JOINED: tl.constexpr,  # heads that have their ranges joined at once
    FEW_JOINED: tl.constexpr,
    TURNS: tl.constexpr,  # ranges are joined in turns
    EARLY: tl.constexpr,  # 1: the first tile is loaded before the kernel waits, else 0
    F: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = HEADS * G
    TOKENS: tl.constexpr = BLOCK_N // HEADS
    KV_ROWS: tl.constexpr = 1 if HEADS == 1 else G_PAD  # of the new keys and values: one serves all rows of one head
    group = tl.program_id(0)
    s = tl.program_id(1)
    split = tl.program_id(2)  # the programs without work are the last ones
    splits = SPLITS
    if LONG_TILES > 0:
        splits = tl.num_programs(2)
    row = tl.load(query_start_ptr + s)
    queries = tl.load(query_start_ptr + s + 1) - row
    length = tl.load(seq_len_ptr + s)
    start, first, tiles, per_split = split_bounds(length, splits, WINDOW, TOKENS, SPLITS, MIN_TILES, LONG_TILES)
    lo = first + split * per_split
    hi = tl.minimum(lo + per_split, first + tiles)
    last = length - 1
    table_row = table_ptr + s.to(tl.int64) * TABLE_ROW
    head_ptr = cache_ptr + group * HEADS * CACHE_HEAD
    cache_block = tile_blocks(table_row, lo, last, P, BLOCK_N, HEADS)
    last_block = tl.load(table_row + last // P).to(tl.int64)
    q_weight, q_other_weight = load_norm(q_norm_ptr, E, E_PAD, F, NORM)
    k_weight, k_other_weight = load_norm(k_norm_ptr, E, E_PAD, F, NORM)
    k_scale, v_scale = load_scales(kv_scales_ptr, SCALED)
    score_scale = SCALE * k_scale
    if EARLY:  # what earlier steps wrote into the cache stays
        first_keys, first_values, first_seen = load_tile(
            head_ptr, cache_block, lo, start, tl.where(lo < hi, last, 0), CACHE_BLOCK, CACHE_KV, CACHE_HEAD, CACHE_POS,
            WINDOW, HEADS, E, E_PAD, P, BLOCK_N,
        )  # fmt: skip
        cache_block = tile_blocks(table_row, lo + 1, last, P, BLOCK_N, HEADS)
    if not EMULATED:
        # The first tile is on its way while the queries are still being made; more would delay it.
        if (EARLY == 0) & (lo < hi):
            slot = head_ptr + tile_slots(cache_block, lo, CACHE_BLOCK, CACHE_POS, P, BLOCK_N, CACHE_HEAD, HEADS)
            prefetch_lines(slot, CACHE_KV, LINE, LINES)
        tl.extra.cuda.gdc_wait()
    if (queries == 1) & ((split == 0) | (lo < hi)):
        g = tl.arange(0, G_PAD)
        e = tl.arange(0, E_PAD)
        row64 = row.to(tl.int64)
        in_e = e < E
        in_g = (g < ROWS)[:, None]
        in_q = in_g & in_e[None, :]
        q_row = q_ptr + row64 * Q_ROW + (group * ROWS + g[:, None]) * Q_HEAD
        one = tl.arange(0, 1)[:, None]
        r = tl.arange(0, KV_ROWS)
        in_r = (r < ROWS)[:, None]
        kv_head = (group * HEADS + r // G)[:, None]
        k_row = k_ptr + row64 * K_ROW + kv_head * K_HEAD
        # All loads first: they are answered together.
        q, q_other = load_heads(q_row, in_g, E, E_PAD, F)
        k_new, k_other = load_heads(k_row, in_r, E, E_PAD, F)
        v_row = v_ptr + row64 * V_ROW + kv_head * V_HEAD
        v_new = tl.load(v_row + e[None, :], mask=in_r & in_e[None, :], other=0.0)
        cos, sin = load_angles(row, one == 0, cos_ptr, sin_ptr, E_PAD, F)
        q = rotate(q, q_other, q_weight, q_other_weight, cos, sin, E, F, NORM, EPS)
        k_new = rotate(k_new, k_other, k_weight, k_other_weight, cos, sin, E, F, NORM, EPS)

        k_entry = as_entries(k_new, k_scale, cache_ptr.dtype.element_ty, SCALED, EMULATED)
        v_entry = as_entries(v_new, v_scale, cache_ptr.dtype.element_ty, SCALED, EMULATED)
        k_new, v_new = k_entry.to(tl.float32), v_entry.to(tl.float32)

        own = split == 0
        if WRITE:
            own_e = e < tl.where(own, E, 0)
            own_r = in_r & (r % G == 0)[:, None]
            slot = head_ptr + last_block * CACHE_BLOCK + (last % P) * CACHE_POS + (r // G)[:, None] * CACHE_HEAD
            tl.store(slot + e[None, :], k_entry, mask=own_r & own_e[None, :])
            tl.store(slot + e[None, :] + CACHE_KV, v_entry, mask=own_r & own_e[None, :])

        score = tl.sum(q.to(tl.float32) * k_new, axis=1)
        if LOG2E_CAP > 0:
            score = soft_cap(score, LOG2E_CAP, score_scale)
        else:
            score = score * score_scale
        if SINKS:  # range 0 begins with the sink and the new token
            sink = load_sinks(sinks_ptr, group * ROWS + g, g < ROWS)
            first_top = tl.maximum(score, sink)
            share = tl.exp2(score - first_top)
            top = tl.where(own, first_top, float("-inf"))
            total = tl.where(own, share + tl.exp2(sink - first_top), 0.0)
            acc = tl.where(own, v_new, 0.0) * share[:, None]
        else:
            top = tl.where(own, score, float("-inf"))
            total = tl.where(own, 1.0, 0.0) + tl.zeros([G_PAD], tl.float32)
            acc = tl.where(own, v_new, 0.0) + tl.zeros([G_PAD, E_PAD], tl.float32)

        q, powers = as_queries(q, cache_ptr.dtype.element_ty)
        row_scale = (score_scale * powers)[:, None]
        if EARLY:
            top, total, acc = _attend(q, first_keys, first_values, first_seen, row_scale, top, total, acc,
                                      G, HEADS, G_PAD, BLOCK_N, LOG2E_CAP, EMULATED)  # fmt: skip
        for tile in range(lo + EARLY, hi):
            keys, values, seen = load_tile(
                head_ptr, cache_block, tile, start, last, CACHE_BLOCK, CACHE_KV, CACHE_HEAD, CACHE_POS, WINDOW, HEADS,
                E, E_PAD, P, BLOCK_N,
            )  # fmt: skip
            cache_block = tile_blocks(table_row, tile + 1, last, P, BLOCK_N, HEADS)
            top, total, acc = _attend(q, keys, values, seen, row_scale, top, total, acc,
                                      G, HEADS, G_PAD, BLOCK_N, LOG2E_CAP, EMULATED)  # fmt: skip

        acc = acc * (v_scale / total)[:, None]
        heads = group * ROWS + g
        if tiles <= per_split:
            out = out_ptr + (row64 * H + heads)[:, None] * E + e[None, :]
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_q)
        else:
            base = s.to(tl.int64) * splits
            at_split = (base + split) * H + heads
            tl.store(partial_ptr + at_split[:, None] * E + e[None, :], acc, mask=in_q)
            tl.store(lse_ptr + at_split, top + tl.log2(total), mask=g < ROWS)
            join_as_last(
                arrived_ptr + s * GROUPS + group, partial_ptr, lse_ptr, out_ptr, base, splits, tiles, per_split, row64,
                group, ROWS, H, ROWS, ROWS, E, E_PAD, RANGES, FEW, JOINED, FEW_JOINED, TURNS,
            )  # fmt: skip


def _joined(rows: int, E: int, ranges: int) -> int:
    """Query heads that have their ranges joined at once. With few ranges, which are long, one: the join then takes no
    registers from the loop before it."""
    return 1 if ranges < FEW_RANGES else joined_rows(rows, E, ranges)


def joined_rows(rows: int, E: int, ranges: int) -> int:
    """As many as a program's registers hold."""
    return min(power_of_2(rows, 1), max(1, _JOINED // (ranges * power_of_2(E))))


def ranges_of(S: int, groups: int, splits: int, most: int) -> int:
    """Ranges of a sequence in a launch for S sequences: as many as make `_PROGRAMS` programs, within bounds. groups:
    programs of a range."""
    if most <= splits:
        return splits
    return torch.sym_max(splits, torch.sym_min(most, _PROGRAMS // (S * groups)))


def range_cells(S: int, groups: int, splits: int, most: int) -> int:
    """Room for the partial results of all ranges by `ranges_of`. It grows with S, as memory is planned for the largest
    batch."""
    return S * splits + (_PROGRAMS // groups if most > splits else 0) if most > 1 else 1


def in_turns(splits: int, most: int) -> bool:
    """Whether ranges are joined in turns, which takes few registers."""
    return most > max(splits, FEW_RANGES)


def launch_split(
    kernel: Any,
    rows: Rows,
    paged: Paged,
    out_THE: Tensor,
    scores: Scores,
    kv_scales: Tensor | None,
    rotary: Rotary | None,
    *pointers: Tensor,
    grid: tuple[int, int, int],
    cells: int,
    counters: int,
    splits: int,
    most: int,
    joined: int,
    few_joined: int,
    min_tiles: int,
    long_tiles: int,
    block_n: int,
    warps: int,
    stages: int,
    **own: int,
) -> None:
    """Start a kernel that divides contexts into ranges.

    pointers, own: tensors and constants that only this kernel has.
    grid: numbers of programs; the last one is the ranges of a sequence.
    cells: partial results of a head that have room.
    counters: of programs that have finished.
    splits, most: ranges of a sequence where sequences are many, and where they are few.
    joined, few_joined: rows that have their ranges joined at once, and if there are few ranges.
    min_tiles, long_tiles: least tiles of a range, and if there are more than ``splits``.
    """
    q_THE, (H, E) = rows.q_THE, rows.q_THE.shape[1:]
    kv_cache, *where = paged
    K, P = kv_cache.shape[2], kv_cache.shape[3]
    partial = torch.empty((cells, H, E), dtype=torch.float32, device=q_THE.device)
    lse = torch.empty((cells, H), dtype=torch.float32, device=q_THE.device)
    score_scale, log2e_cap = score_constants(scores.scale, scores.softcap)
    rotated, rotation = rotary_arguments(rotary, q_THE)
    line = 128 // kv_cache.element_size()
    launch_triton(
        kernel, grid,
        *rows, kv_cache, out_THE, partial, lse, zeroed(q_THE, counters),
        *where, *rotated, q_THE if scores.sinks_H is None else scores.sinks_H,
        q_THE if kv_scales is None else kv_scales, *pointers,
        **head_strides(rows), CACHE_BLOCK=kv_cache.stride(0), CACHE_KV=kv_cache.stride(1),
        CACHE_HEAD=kv_cache.stride(2), CACHE_POS=kv_cache.stride(3), TABLE_ROW=paged.block_table.stride(0),
        SCALE=score_scale, LOG2E_CAP=log2e_cap, WINDOW=scores.window, H=H, G=H // K, E=E, E_PAD=power_of_2(E), P=P,
        SPLITS=splits, RANGES=power_of_2(most, 2), FEW=FEW_RANGES, MIN_TILES=min_tiles,
        LONG_TILES=long_tiles if most > splits else 0, TURNS=in_turns(splits, most), BLOCK_N=block_n,
        JOINED=joined, FEW_JOINED=few_joined, LINE=line, LINES=1 << (max(1, E // line).bit_length() - 1),
        SINKS=scores.sinks_H is not None, SCALED=kv_scales is not None, EMULATED=triton.knobs.runtime.interpret,
        num_warps=warps, num_stages=stages, **rotation, **own,
    )  # fmt: skip


def launch_decode(
    rows: Rows, paged: Paged, *others: Any, write: bool, heads: int, splits: int, most: int, joined: int,
    early: int = 0, **plan: Any,
) -> None:  # fmt: skip
    """Attend for the sequences of the batch that have exactly one query token; the others are not touched.

    others: as of `launch_split`.
    heads: KV heads of a program, which share a tile of ``block_n`` columns.
    splits, most: ranges of a sequence where sequences are many and where they are few.
    """
    (H, E), K, S = rows.q_THE.shape[1:], paged.kv_cache.shape[2], paged.seq_lens.shape[0]
    packed, groups = H // K * heads, K // heads
    launch_split(
        _split_kernel, rows, paged, *others, grid=(groups, S, ranges_of(S, groups, splits, most)),
        cells=range_cells(S, groups, splits, most), counters=S * K if most > 1 else 1, splits=splits, most=most,
        joined=joined,
        few_joined=_joined(packed, E, FEW_RANGES) if joined > 1 else 1, WRITE=write, HEADS=heads, GROUPS=groups,
        EARLY=early, G_PAD=power_of_2(packed), **plan,
    )  # fmt: skip


# Few sequences are over before the chip is full: what counts is how soon the first tile is there. Small tiles, with one
# loaded early, leave room for programs of the kernel before (bench/notes/gpu_decode.md, step 19).
_FEW_SEQUENCES = 16
_ALONE = {"early": 1, "min_tiles": 1, "stages": 1}
_BESIDE_FEW = {"early": 1, "min_tiles": 2, "long_tiles": 8, "block_n": 32}


def plan_splits(S: int, fewest: int, H: int, K: int, longest: int, dtype: torch.dtype, E: int) -> Config:
    """Launch constants of decode from static facts: most sequences (0 in steps with prompts) and fewest, query and KV
    heads, longest context.

    Few sequences: ranges of at least two or four tiles until the chip holds about four programs a processor. Many: a
    program serves several heads, so that about four programs a processor are left, because what a program waits for
    before its first tile and after its last is not hidden when contexts are short. One range each would do if lengths
    were equal; there are more, of at least 512 to 2,048 tokens, so that a long sequence does not run as the only one at
    the end. Two stages: with three, the programs take so much shared memory that they do not run at the same time as
    programs of the kernels around them. Entries of one byte go to half as many threads, in tiles as large as otherwise
    where sequences are many. A launch for few of a bucket's sequences has up to ``most`` ranges instead of ``splits``,
    each of at least ``long_tiles``. Measured on an H200, see bench/notes/gpu_decode.md.
    """
    rows, heads, narrow = S * K, 1, dtype.itemsize == 1
    if not rows:  # mixed steps are long, so the ranges suit many sequences
        splits, least = 8, 2048
    elif rows < 256:
        splits = min(32, -(-512 // rows))
        least = 128 if splits >= 8 else 256
    elif rows < 1024:
        splits, least = 4, 512
    elif rows < 4096:
        heads = 2 if rows < 2048 else 4
        splits, least = 8 if longest <= 16384 else 16, 1024
    else:
        splits, least = 2 if longest <= 16384 else 4, 2048
    block_n = 32 if dtype == torch.float32 or E > 128 else 64
    while heads > 1 and (K % heads or heads * (H // K) > 16 or block_n // heads < 16):
        heads //= 2
    if narrow and rows >= 2048:
        block_n *= 2
    enough = max(1, -(-longest // least))
    most = max(splits, min(_MOST_RANGES, _PROGRAMS * heads // (max(1, fewest) * K)))
    splits, most = min(splits, enough), min(most, enough)
    joined = _joined(heads * (H // K), E, power_of_2(splits, 2)) if 0 < rows < 256 else 1
    if in_turns(splits, most):
        joined = joined_rows(heads * (H // K), E, 4 * FEW_RANGES)
    return {
        "heads": heads, "splits": splits, "most": most, "joined": joined,
        "min_tiles": max(1, least * heads // block_n), "long_tiles": max(1, _LONG * heads // block_n),
        "block_n": block_n, "warps": 2 if narrow else 4, "stages": 2,
    }  # fmt: skip


def is_decode(site: CallSite) -> bool:
    """Whether the split kernel serves the site by itself."""
    return site.bucket.kind == "decode" and site.bucket.query_len == 1 and attends(site)


def decode_configs(site: CallSite) -> list[Config]:
    """The plan for the bucket's largest batch. Measured against it on an H200, the plan for a fourth as many sequences
    looked faster on some steps and was 10 % slower over real ones, so there is nothing to choose among."""
    cache, table = site.args["kv_cache"], site.args["block_table"]
    H, (_, K, P, E) = site.args["q_THE"].shape[1], cache.shape[1:]
    plan = plan_splits(site.bucket.hi, site.bucket.lo, H, K, table.shape[1] * P, cache.dtype, E)
    few = site.bucket.hi <= _FEW_SEQUENCES and plan["heads"] == 1 and cache.dtype.itemsize == 2
    return [{**plan, **(_ALONE if site.bucket.hi == 1 else _BESIDE_FEW)} if few else plan]


@paged_attention.impl("triton_decode", device="cuda", supports=is_decode, configs=decode_configs, remedy=problem)
def triton_decode(
    rows: Rows, paged: Paged, scores: Scores, kv_scales: Tensor | None, rotary: Rotary | None, **config: int
) -> Tensor:
    """Pure decode: every sequence has zero or one query token, and no trees."""
    out_THE = torch.empty_like(rows.q_THE, memory_format=torch.contiguous_format)
    launch_decode(rows, paged, out_THE, scores, kv_scales, rotary, write=True, **config)
    return out_THE
