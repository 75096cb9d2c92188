"""Attention of prompts on Hopper with rows bitwise equal to `triton_range_kernel`'s: the warps, barriers and shared
memory of `gluon_flash`, the tiles, ranges and instructions of that kernel.

Tiles have 64 tokens and are taken from the first to the last. When one begins a range, what the range before gave is
joined, and sums begin anew. Which multiplications and additions are one instruction is said here, where the two
compilers could choose otherwise. A score is the same number whether a group computes it early or late, so the overlap
of `gluon_flash` stays.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102  (a branch on a constexpr joins no other condition; Gluon unpacks all or nothing)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from graphllm.ops.attention.paged_attention.gluon_flash import (
    clear_values,
    find_item,
    first_scores,
    following_scores,
    item_tiles,
    nth_item,
    softmax,
    write_rows,
)


@gluon.jit
def _store_queries(
    queries, q_ptr, q_norm_ptr, cos_ptr, sin_ptr, row0, left, skip, head, GROUP: gl.constexpr,
    Q_ROW: gl.constexpr, Q_HEAD: gl.constexpr, G: gl.constexpr, E: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr,
    EPS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """A group's query rows into shared memory, as `triton_common.load_rotated` makes them: a row's numbers lie among
    threads as there, so that the sum of their squares has the same order. left: query tokens of the sequence."""
    PART: gl.constexpr = 16 if WINDOW > 0 else 32  # rows at a time, as registers allow
    HALF: gl.constexpr = E // 2
    BLOCK_Q: gl.constexpr = 128 // G
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [4, 1], [1, 0])
    e = gl.arange(0, E, layout=gl.SliceLayout(0, layout))
    other = gl.where(e < HALF, e + HALF, e - HALF)
    for i in gl.static_range(0, 64, PART):
        m = GROUP * 64 + i + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
        token = skip + m // G
        inside = ((m < BLOCK_Q * G) & (token < left))[:, None]
        row = (row0 + token).to(gl.int64)
        at = q_ptr + (row * Q_ROW + (head * G + m % G) * Q_HEAD)[:, None]
        found = gl.load(at + e[None, :], mask=inside, other=0.0)
        if NORM or F > 0:
            x = found.to(gl.float32)
            if NORM:
                scale = gl.rsqrt(gl.sum(x * x, 1) / E + EPS)[:, None]
                weight = gl.load(q_norm_ptr + e).to(gl.float32)[None, :]
                x = ((x * scale).to(found.dtype).to(gl.float32) * weight).to(found.dtype).to(gl.float32)
            if F > 0:
                y = gl.load(at + other[None, :], mask=inside, other=0.0).to(gl.float32)
                if NORM:
                    other_weight = gl.load(q_norm_ptr + other).to(gl.float32)[None, :]
                    y = ((y * scale).to(found.dtype).to(gl.float32) * other_weight).to(found.dtype).to(gl.float32)
                angle = (row * F)[:, None] + gl.where(e < HALF, e, other)[None, :]
                cos = gl.load(cos_ptr + angle, mask=inside, other=1.0).to(found.dtype).to(gl.float32)
                sin = gl.load(sin_ptr + angle, mask=inside, other=0.0).to(found.dtype).to(gl.float32)
                x = gl.fma(x, cos, y * gl.where((e < HALF)[None, :], -sin, sin))
            found = x.to(found.dtype)
        queries.slice(i, PART, dim=0).store(found)
    hopper.fence_async_shared()


@gluon.jit
def _join(joined, joined_top, joined_total, acc, top, total, out_layout: gl.constexpr):
    """What ranges gave so far and what the next one gives, as `triton_ranges` joins them."""
    new_top = gl.maximum(joined_top, top)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    kept = gl.exp2(joined_top - shift)
    added = gl.exp2(top - shift)
    kept_rows = gl.convert_layout(kept, gl.SliceLayout(1, out_layout))[:, None]
    added_rows = gl.convert_layout(added, gl.SliceLayout(1, out_layout))[:, None]
    return gl.fma(joined, kept_rows, acc * added_rows), new_top, gl.fma(joined_total, kept, total * added)


@gluon.jit
def _attend_tiles(
    lo, hi, last, n_tile, weights, acc, top, total, joined, joined_top, joined_total, position, queries, keys, values,
    k_full, k_free, v_full, v_free, turn,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr, BLOCK_N: gl.constexpr, RANGE: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, GROUP: gl.constexpr, out_layout: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Tiles lo .. hi. ``weights`` are of the tile before, the n_tile-th; its product with values is still to be made,
    and so is the last tile's at the end."""
    for tile in range(lo, hi):
        stage = n_tile % STAGES
        scores, product = following_scores(
            queries, keys, values, weights, acc, k_free, v_full, turn, n_tile, BLOCK_N, STAGES, TURNS, GROUP, layout
        )
        begins = tile % (RANGE // BLOCK_N) == 0
        old_top = top
        old_total = total
        new, top, total, rescale = softmax(
            scores, gl.where(begins, float("-inf"), top), gl.where(begins, 0.0, total), position, tile, MASKED, WINDOW,
            SCALE, BLOCK_N, True, layout,
        )  # fmt: skip
        # The branches of this wait keep ptxas from making the softmax after the product that it is to hide.
        mbarrier.wait(k_full.index((n_tile + 2) % STAGES), ((n_tile + 2) // STAGES) & 1, pred=tile + 1 < last)
        acc, new = hopper.warpgroup_mma_wait(0, deps=[product, new])
        mbarrier.arrive(v_free.index(stage), count=1)
        if begins:
            joined, joined_top, joined_total = _join(
                joined, joined_top, joined_total, acc, old_top, old_total, out_layout
            )
            acc = gl.zeros_like(acc)
        else:
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        weights = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
        n_tile += 1
    return n_tile, weights, acc, top, total, joined, joined_top, joined_total


@gluon.jit
def attend_ranges(
    all_queries, keys, values, k_full, k_free, v_full, v_free, turn, q_ptr, out_ptr, query_start_ptr, seq_len_ptr,
    q_norm_ptr, cos_ptr, sin_ptr, sinks_ptr, S, items,
    Q_ROW: gl.constexpr, Q_HEAD: gl.constexpr, SCALE: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    K: gl.constexpr, G: gl.constexpr, E: gl.constexpr, BLOCK_N: gl.constexpr, RANGE: gl.constexpr,
    STAGES: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr, EPS: gl.constexpr, SINKS: gl.constexpr,
    TURNS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: attention for 64 of the rows of each item."""
    BLOCK_Q: gl.constexpr = 128 // G
    dtype: gl.constexpr = keys.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    queries_of_group = all_queries.index(GROUP)
    n_tile = 0
    _, row0, queries, length, skip = find_item(nth_item(0), items, query_start_ptr, seq_len_ptr, S, K, BLOCK_Q)
    for n in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = nth_item(n)
        next_row0 = row0
        next_queries = queries
        next_length = length
        next_skip = skip
        if (item < items) & (queries > 1) & (skip < queries):
            begin, first, inner, full, last = item_tiles(queries, length, skip, WINDOW, BLOCK_Q, BLOCK_N)
            head = item % K
            _store_queries(
                queries_of_group, q_ptr, q_norm_ptr, cos_ptr, sin_ptr, row0, queries, skip, head, GROUP, Q_ROW,
                Q_HEAD, G, E, F, NORM, EPS, WINDOW,
            )  # fmt: skip
            m = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
            position = length - queries + skip + m // G
            top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, layout))
            total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, layout))
            acc = gl.zeros([64, E], gl.float32, layout=out_layout)
            joined = acc
            joined_top = top
            joined_total = total
            stage = n_tile % STAGES
            scores = first_scores(
                queries_of_group, keys, k_full, k_free, turn, n_tile, BLOCK_N, STAGES, TURNS, GROUP, layout
            )
            new, top, total, _ = softmax(
                scores, top, total, position, first, True, WINDOW, SCALE, BLOCK_N, True, layout
            )
            weights = gl.convert_layout(new.to(dtype), weights_layout)
            if WINDOW > 0:
                if begin > first * BLOCK_N:
                    mbarrier.wait(v_full.index(stage), (n_tile // STAGES) & 1)
                    clear_values(values.index(stage), begin - first * BLOCK_N, BLOCK_N, BLOCK_N, E)
            mbarrier.wait(k_full.index((n_tile + 1) % STAGES), ((n_tile + 1) // STAGES) & 1, pred=first + 1 < last)
            second = first + 1
            whole = gl.maximum(inner, second)
            if WINDOW > 0:
                n_tile, weights, acc, top, total, joined, joined_top, joined_total = _attend_tiles(
                    second, whole, last, n_tile, weights, acc, top, total, joined, joined_top, joined_total, position,
                    queries_of_group, keys, values, k_full, k_free, v_full, v_free, turn, True, WINDOW, SCALE, BLOCK_N,
                    RANGE, STAGES, TURNS, GROUP, out_layout, layout,
                )  # fmt: skip
            n_tile, weights, acc, top, total, joined, joined_top, joined_total = _attend_tiles(
                whole, full, last, n_tile, weights, acc, top, total, joined, joined_top, joined_total, position,
                queries_of_group, keys, values, k_full, k_free, v_full, v_free, turn, False, WINDOW, SCALE, BLOCK_N,
                RANGE, STAGES, TURNS, GROUP, out_layout, layout,
            )  # fmt: skip
            n_tile, weights, acc, top, total, joined, joined_top, joined_total = _attend_tiles(
                gl.maximum(full, whole), last, last, n_tile, weights, acc, top, total, joined, joined_top,
                joined_total, position, queries_of_group, keys, values, k_full, k_free, v_full, v_free, turn, True,
                WINDOW, SCALE, BLOCK_N, RANGE, STAGES, TURNS, GROUP, out_layout, layout,
            )  # fmt: skip
            stage = n_tile % STAGES
            mbarrier.wait(v_full.index(stage), (n_tile // STAGES) & 1)
            if last * BLOCK_N > length:
                clear_values(values.index(stage), 0, length - (last - 1) * BLOCK_N, BLOCK_N, E)
            product = hopper.warpgroup_mma(weights, values.index(stage), acc, is_async=True)
            _, next_row0, next_queries, next_length, next_skip = find_item(
                nth_item(n + 1), items, query_start_ptr, seq_len_ptr, S, K, BLOCK_Q
            )
            acc = hopper.warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(v_free.index(stage), count=1)
            n_tile += 1
            acc, top, total = _join(joined, joined_top, joined_total, acc, top, total, out_layout)
            if SINKS:
                known = m < BLOCK_Q * G
                sink = gl.load(sinks_ptr + head * G + m % G, mask=known, other=0.0).to(gl.float32)
                total += gl.exp2(gl.fma(sink, 1.4426950408889634, -top))
            write_rows(acc, total, out_ptr, row0, queries, skip, head, H, G, E, GROUP, out_layout)
        else:
            _, next_row0, next_queries, next_length, next_skip = find_item(
                nth_item(n + 1), items, query_start_ptr, seq_len_ptr, S, K, BLOCK_Q
            )
        row0 = next_row0
        queries = next_queries
        length = next_length
        skip = next_skip
