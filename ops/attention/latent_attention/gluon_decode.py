"""Decode and verification of latent attention on Hopper: a tile of the cache is both keys and values.

A program's output, 64 query rows by 512 numbers, is half of a multiprocessor's registers. Two groups of four warps have
256 numbers each; a third one computes scores and weights of the tile after theirs, which it hands over in shared
memory; a warp brings tiles by the TMA unit. Parts of a tile come and go one by one.
`triton_decode` has the same kernel for all other GPUs and cases; `triton_absorb` says how sequences are divided.
"""

# mypy: allow-untyped-defs
# ruff: noqa: RUF005, RUF059  (Gluon unpacks all or nothing)

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from graphllm.ir import CallSite, GluonKernel, runs_gluon
from graphllm.ops.attention.latent_attention.op import latent_attention
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_absorb import (
    Config,
    absorbed_problem,
    attend_absorbed,
    is_absorbed,
    plan_absorbed,
)
from graphllm.ops.attention.latent_attention.triton_common import problem
from graphllm.ops.attention.paged_attention.triton_common import power_of_2
from graphllm.program.specs import LATENT_GROUP

_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # until Triton 3.6

_L, _R = 512, 64
TILE = gl.constexpr(64)  # tokens of a tile, and query rows of a program
LATENT = gl.constexpr(_L)
GROUP = gl.constexpr(LATENT_GROUP)
GROUPS = gl.constexpr(_L // LATENT_GROUP)
ROTATED = gl.constexpr(_R)
PIECE = gl.constexpr(16)  # tokens of a tile in 8 bits that are converted at once
PIECES = gl.constexpr(4)


@gluon.jit
def _first_item(plan_ptr, S, PROGRAMS: gl.constexpr, MIN_TILES: gl.constexpr, ROW_TILES: gl.constexpr):
    """A program's first and last tile of all, and its first sequence."""
    program = gl.program_id(0) // ROW_TILES
    total = gl.load(plan_ptr + PROGRAMS + S)
    share = gl.maximum((total + PROGRAMS - 1) // PROGRAMS, MIN_TILES)
    tile = program * share
    last = gl.minimum(tile + share, total)
    return program, tile, last, gl.load(plan_ptr + program, mask=tile < last, other=0)


@gluon.jit
def _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s, S, PROGRAMS: gl.constexpr):
    """A sequence's first tile of all, one past its last, its query tokens and its length. Groups of warps ask for a
    sequence while they are at the one before, because loads take long."""
    s = gl.minimum(s, S - 1)
    begin = gl.load(plan_ptr + PROGRAMS + s)
    end = gl.load(plan_ptr + PROGRAMS + s + 1)
    tokens = gl.load(query_start_ptr + s + 1) - gl.load(query_start_ptr + s)
    return begin, end, tokens, gl.load(seq_len_ptr + s)


@gluon.jit
def _cache_rows(
    table_row, i, length, CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """In which rows of the cache the parts of a sequence's i-th tile begin, each of one block. The last block that it
    owns stands for those beyond its length."""
    rows = ()
    for part in gl.static_range(PARTS):
        position = i * TILE + part * (TILE // PARTS)
        block = gl.load(table_row + gl.minimum(position, length - 1) // P)
        rows = rows + (block * (CACHE_BLOCK // CACHE_POS) + position % P,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _bring_tiles(
    entries, latents, rotated, full, free, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
    CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, TABLE_ROW: gl.constexpr, P: gl.constexpr,
    PROGRAMS: gl.constexpr, MIN_TILES: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room."""
    PARTS: gl.constexpr = TILE // P if P < TILE else 1
    TOKENS: gl.constexpr = TILE // PARTS
    program, tile, last, s = _first_item(plan_ptr, S, PROGRAMS, MIN_TILES, ROW_TILES)
    begin, end, tokens, length = _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s, S, PROGRAMS)
    n = 0
    while tile < last:
        following = _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        table_row = table_ptr + s.to(gl.int64) * TABLE_ROW
        if tile < end:
            rows = _cache_rows(table_row, tile - begin, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
            for i in range(tile - begin, end - begin):
                next_rows = _cache_rows(table_row, i + 1, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
                stage = n % STAGES
                for g in gl.static_range(GROUPS):
                    arrived = full.index(stage * GROUPS + g)
                    mbarrier.wait(free.index(stage * GROUPS + g), ((n // STAGES) & 1) ^ 1)
                    mbarrier.expect(arrived, TILE * (GROUP + (ROTATED if g == GROUPS - 1 else 0)) * 2)
                    for part in gl.static_range(PARTS):
                        for column in gl.static_range(0, GROUP, 64):
                            to = latents.index(stage * GROUPS + g).slice(part * TOKENS, TOKENS, dim=0)
                            to = to.slice(column, 64, dim=1)
                            _load_tile(entries, [rows[part], g * GROUP + column], arrived, to)
                        if g == GROUPS - 1:
                            to = rotated.index(stage).slice(part * TOKENS, TOKENS, dim=0)
                            _load_tile(entries, [rows[part], LATENT], arrived, to)
                rows = next_rows
                n += 1
        tile = gl.maximum(tile, end)
        s += 1
        begin, end, tokens, length = following


@gluon.jit
def _piece(words, rows, i: gl.constexpr, CACHE_POS: gl.constexpr):
    """Where the i-th 16 tokens of a tile begin in the cache."""
    PER_PART: gl.constexpr = PIECES // len(rows)
    return words + (rows[i // PER_PART] + i % PER_PART * PIECE).to(gl.int64) * (CACHE_POS // 4)


@gluon.jit
def _load_group(words, rows, g, CACHE_POS: gl.constexpr, layout: gl.constexpr):
    """Of each piece of a tile the words of the g-th group of latents [PIECE, GROUP // 4] and their scales."""
    t = gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout)) * (CACHE_POS // 4)
    w = g * (GROUP // 4) + gl.arange(0, GROUP // 4, layout=gl.SliceLayout(0, layout))
    found = ()
    for i in gl.static_range(PIECES):
        row = _piece(words, rows, i, CACHE_POS)
        scales = gl.load((row + LATENT // 4 + g).to(gl.pointer_type(gl.float32), bitcast=True) + t)
        found = found + ((gl.load(row + t[:, None] + w[None, :]), scales),)  # type: ignore[assignment]
    return found


@gluon.jit
def _numbers(words, scales):
    """The bfloat16 numbers [T, 4 * W] that words [T, W] of four entries stand for."""
    a, b, c, d = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high, h<4>;
        .reg .b32 v, w;
        .reg .f32 f<4>;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 v, low;
        cvt.rn.f16x2.e4m3x2 w, high;
        mov.b32 {h0, h1}, v;
        mov.b32 {h2, h3}, w;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        mul.f32 f0, f0, $5;
        mul.f32 f1, f1, $5;
        mul.f32 f2, f2, $5;
        mul.f32 f3, f3, $5;
        cvt.rn.bf16x2.f32 v, f1, f0;
        cvt.rn.bf16x2.f32 w, f3, f2;
        mov.b32 {$0, $1}, v;
        mov.b32 {$2, $3}, w;
        }
        """,
        "=h,=h,=h,=h,r,f", [words, scales[:, None]], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [words.shape[0], 4 * words.shape[1]])


@gluon.jit
def _prefetch(words, rows, CACHE_POS: gl.constexpr):
    """Ask for the parts of a tile to be brought to the L2 cache, by one thread of the group."""
    BYTES: gl.constexpr = TILE // len(rows) * CACHE_POS
    for part in gl.static_range(len(rows)):
        gl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 first, t, 0;"
            " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,n",
            [(words + rows[part].to(gl.int64) * (CACHE_POS // 4)).to(gl.int64), BYTES], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def _convert_tiles(
    cache_ptr, latents, rotated, full, free, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
    CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, TABLE_ROW: gl.constexpr, P: gl.constexpr,
    PROGRAMS: gl.constexpr, MIN_TILES: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the group of warps does that fills shared memory from a cache in 8 bits, a group of numbers at a time. The
    next two are on their way to registers, the next two tiles to the L2 cache."""
    PARTS: gl.constexpr = TILE // P if P < TILE else 1
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    words = cache_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    r = gl.arange(0, ROTATED, layout=gl.SliceLayout(0, wide))[None, :]
    t = gl.arange(0, PIECE, layout=gl.SliceLayout(1, wide))[:, None]
    program, tile, last, s = _first_item(plan_ptr, S, PROGRAMS, MIN_TILES, ROW_TILES)
    begin, end, tokens, length = _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s, S, PROGRAMS)
    n = 0
    while tile < last:
        following = _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        table_row = table_ptr + s.to(gl.int64) * TABLE_ROW
        if tile < end:
            rows = _cache_rows(table_row, tile - begin, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
            rows1 = _cache_rows(table_row, tile - begin + 1, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
            rows2 = _cache_rows(table_row, tile - begin + 2, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
            first = _load_group(words, rows, 0, CACHE_POS, layout)
            second = _load_group(words, rows, 1, CACHE_POS, layout)
            _prefetch(words, rows1, CACHE_POS)
            for i in range(tile - begin, end - begin):
                stage = n % STAGES
                rows3 = _cache_rows(table_row, i + 3, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
                _prefetch(words, rows2, CACHE_POS)
                for g in range(GROUPS):
                    of_third = ()
                    for part in gl.static_range(PARTS):
                        of_third = of_third + (gl.where(g < GROUPS - 2, rows[part], rows1[part]),)  # type: ignore
                    third = _load_group(words, of_third, (g + 2) % GROUPS, CACHE_POS, layout)
                    mbarrier.wait(free.index(stage * GROUPS + g), ((n // STAGES) & 1) ^ 1)
                    if g == GROUPS - 1:
                        for j in gl.static_range(PIECES):
                            entry = _piece(words, rows, j, CACHE_POS) + LATENT // 4 + GROUPS
                            entry = entry.to(gl.pointer_type(gl.bfloat16), bitcast=True) + t * (CACHE_POS // 2) + r
                            async_copy.async_copy_global_to_shared(rotated.index(stage).slice(j * PIECE, PIECE), entry)
                    for j in gl.static_range(PIECES):
                        found, scales = first[j]
                        latents.index(stage * GROUPS + g).slice(j * PIECE, PIECE).store(_numbers(found, scales))
                    async_copy.commit_group()
                    async_copy.wait_group(0)
                    hopper.fence_async_shared()
                    _barrier()
                    mbarrier.arrive(full.index(stage * GROUPS + g), count=1)
                    first = second
                    second = third
                rows = rows1
                rows1 = rows2
                rows2 = rows3
                n += 1
        tile = gl.maximum(tile, end)
        s += 1
        begin, end, tokens, length = following


@gluon.jit
def _score(
    q_entries, queries, q_rotated, latents, rotated, weights, factors, arrived, full, free, given, taken, lse_ptr,
    plan_ptr, query_start_ptr, seq_len_ptr, S,
    SCALE: gl.constexpr, H: gl.constexpr, Q: gl.constexpr, ROWS: gl.constexpr, PROGRAMS: gl.constexpr,
    MIN_TILES: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the group of warps does that multiplies queries with keys: it gives weights of tiles to the other groups,
    and with them what their sums are to be multiplied by; after a sequence's last tile, one over the weights' sum."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    program, tile, last, s = _first_item(plan_ptr, S, PROGRAMS, MIN_TILES, ROW_TILES)
    begin, end, tokens, length = _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s, S, PROGRAMS)
    first_m = gl.program_id(0) % ROW_TILES * TILE
    n = 0
    step = 0
    item = 0
    while tile < last:
        following = _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        if tile < end:
            mbarrier.expect(arrived, ROWS * (LATENT + ROTATED) * 2)
            row = s * (Q * H) + first_m
            for g in gl.static_range(GROUPS):
                for column in gl.static_range(0, GROUP, 64):
                    to = queries.index(g).slice(0, ROWS, dim=0).slice(column, 64, dim=1)
                    _load_tile(q_entries, [row, g * GROUP + column], arrived, to)
            _load_tile(q_entries, [row, LATENT], arrived, q_rotated.slice(0, ROWS, dim=0))
            mbarrier.wait(arrived, item & 1)
            item += 1
            m = first_m + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
            visible = length - tokens + 1 + m // H
            top = gl.full([TILE], float("-inf"), gl.float32, layout=gl.SliceLayout(1, layout))
            total = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, layout))
            for i in range(tile - begin, end - begin):
                stage = n % STAGES
                scores = gl.zeros([TILE, TILE], gl.float32, layout=layout)
                for g in gl.static_range(GROUPS):
                    mbarrier.wait(full.index(stage * GROUPS + g), (n // STAGES) & 1)
                    keys = latents.index(stage * GROUPS + g).permute((1, 0))
                    scores = hopper.warpgroup_mma(queries.index(g), keys, scores, use_acc=g > 0, is_async=True)
                scores = hopper.warpgroup_mma(q_rotated, rotated.index(stage).permute((1, 0)), scores, is_async=True)
                scores = hopper.warpgroup_mma_wait(0, deps=[scores])
                _barrier()
                for g in gl.static_range(GROUPS):
                    mbarrier.arrive(free.index(stage * GROUPS + g), count=1)
                at = i * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
                scores = gl.where(at[None, :] < visible[:, None], scores, float("-inf"))
                new_top = gl.maximum(top, gl.max(scores, 1) * SCALE)
                shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # later tokens may see nothing of a tile
                found = gl.exp2(scores * SCALE - shift[:, None])
                rescale = gl.exp2(top - shift)
                total = total * rescale + gl.sum(found, 1)
                top = new_top
                mbarrier.wait(taken, (step & 1) ^ 1)
                weights.store(found.to(weights.dtype))
                factors.store(rescale)
                hopper.fence_async_shared()
                _barrier()
                mbarrier.arrive(given, count=1)
                n += 1
                step += 1
            mbarrier.wait(taken, (step & 1) ^ 1)
            factors.store(1.0 / gl.where(total > 0, total, 1.0))
            _barrier()
            mbarrier.arrive(given, count=1)
            step += 1
            part = (program + s).to(gl.int64) * (Q * H) + m
            gl.store(lse_ptr + part, top + gl.log2(total), mask=m < tokens * H)
        tile = gl.maximum(tile, end)
        s += 1
        begin, end, tokens, length = following


@gluon.jit
def _clear(values, first, PART: gl.constexpr):
    """Zeros in the rows of a tile from ``first`` on: no row sees them, but 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for i in gl.static_range(0, TILE, PART):
        some = values.slice(i, PART, dim=0)
        row = i + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
        found = some.load(layout)
        some.store(gl.where((row < first)[:, None], found, gl.zeros_like(found)))


@gluon.jit
def _sum_values(
    latents, weights, factors, free, given, taken, part_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S,
    H: gl.constexpr, Q: gl.constexpr, PROGRAMS: gl.constexpr, MIN_TILES: gl.constexpr, ROW_TILES: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """What a group of warps does that sums one half of the latents, two groups of numbers from FIRST on."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    program, tile, last, s = _first_item(plan_ptr, S, PROGRAMS, MIN_TILES, ROW_TILES)
    begin, end, tokens, length = _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s, S, PROGRAMS)
    m = gl.program_id(0) % ROW_TILES * TILE + gl.arange(0, TILE, layout=of_rows)
    n = 0
    step = 0
    while tile < last:
        following = _sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        if tile < end:
            low = gl.zeros([TILE, GROUP], gl.float32, layout=layout)
            high = gl.zeros([TILE, GROUP], gl.float32, layout=layout)
            for i in range(tile - begin, end - begin):
                at = (n % STAGES) * GROUPS + FIRST
                low_values = latents.index(at)
                high_values = latents.index(at + 1)
                mbarrier.wait(given, step & 1)
                rescale = factors.load(of_rows)[:, None]
                low = low * rescale
                high = high * rescale
                if (i + 1) * TILE > length:
                    _clear(low_values, length - i * TILE, 16)
                    _clear(high_values, length - i * TILE, 16)
                    hopper.fence_async_shared()
                    _barrier()
                low = hopper.warpgroup_mma(weights, low_values, low, is_async=True)
                high = hopper.warpgroup_mma(weights, high_values, high, is_async=True)
                low, high = hopper.warpgroup_mma_wait(0, deps=[low, high])
                _barrier()
                mbarrier.arrive(taken, count=1)
                mbarrier.arrive(free.index(at), count=1)
                mbarrier.arrive(free.index(at + 1), count=1)
                n += 1
                step += 1
            mbarrier.wait(given, step & 1)
            factor = factors.load(of_rows)[:, None]
            _barrier()
            mbarrier.arrive(taken, count=1)
            step += 1
            part = (program + s).to(gl.int64) * (Q * H) + m
            e = FIRST * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(0, layout))
            to = part_ptr + (part * LATENT)[:, None] + e[None, :]
            valid = (m < tokens * H)[:, None]
            gl.store(to, (low * factor).to(part_ptr.dtype.element_ty), mask=valid)
            gl.store(to + GROUP, (high * factor).to(part_ptr.dtype.element_ty), mask=valid)
        tile = gl.maximum(tile, end)
        s += 1
        begin, end, tokens, length = following


@gluon.jit(do_not_specialize=["S"])
def hopper_latent_kernel(
    q_ptr, cache_ptr, part_ptr, lse_ptr, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
    CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, TABLE_ROW: gl.constexpr,
    SCALE: gl.constexpr,  # of q.k, times log2(e)
    H: gl.constexpr, P: gl.constexpr, Q: gl.constexpr, MIN_TILES: gl.constexpr, PROGRAMS: gl.constexpr,
    ROWS: gl.constexpr,  # query rows that are read for a program
    ROW_TILES: gl.constexpr,  # programs for all query rows of a sequence
    STAGES: gl.constexpr,  # tiles in shared memory
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    TOKENS: gl.constexpr = P if P < TILE else TILE
    WIDTH: gl.constexpr = LATENT + ROTATED
    NARROW: gl.constexpr = cache_ptr.dtype.element_ty == gl.float8e4nv
    q_entries = tma.make_tensor_descriptor(q_ptr, [S * (Q * H), WIDTH], [WIDTH, 1], [ROWS, 64], shared)
    entries = cache_ptr
    if not NARROW:
        entries = tma.make_tensor_descriptor(cache_ptr, [2147483647, WIDTH], [CACHE_POS, 1], [TOKENS, 64], shared)
    queries = gl.allocate_shared_memory(dtype, [GROUPS, TILE, GROUP], shared)
    q_rotated = gl.allocate_shared_memory(dtype, [TILE, ROTATED], shared)
    latents = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, TILE, GROUP], shared)
    rotated = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROTATED], shared)
    weights = gl.allocate_shared_memory(dtype, [TILE, TILE], shared)
    factors = gl.allocate_shared_memory(gl.float32, [TILE], flat)
    arrived = gl.allocate_shared_memory(gl.int64, [1], one)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * GROUPS, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES * GROUPS, 1], one)
    given = gl.allocate_shared_memory(gl.int64, [1], one)
    taken = gl.allocate_shared_memory(gl.int64, [1], one)
    for i in gl.static_range(STAGES * GROUPS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(arrived, count=1)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=2)
    hopper.fence_async_shared()
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.warp_specialize(
        [
            (_score, (
                q_entries, queries, q_rotated, latents, rotated, weights, factors, arrived, full, free, given, taken,
                lse_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S, SCALE, H, Q, ROWS, PROGRAMS, MIN_TILES, ROW_TILES,
                STAGES,
            )),
            (_sum_values, (
                latents, weights, factors, free, given, taken, part_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S, H,
                Q, PROGRAMS, MIN_TILES, ROW_TILES, STAGES, 0,
            )),
            (_sum_values, (
                latents, weights, factors, free, given, taken, part_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S, H,
                Q, PROGRAMS, MIN_TILES, ROW_TILES, STAGES, 2,
            )),
            (_convert_tiles if NARROW else _bring_tiles, (
                entries, latents, rotated, full, free, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
                CACHE_BLOCK, CACHE_POS, TABLE_ROW, P, PROGRAMS, MIN_TILES, ROW_TILES, STAGES,
            )),
        ],
        [4, 4, 4 if NARROW else 1],  # warps of the groups after the first, and of what fills shared memory
        [168 if NARROW else 184, 168 if NARROW else 184, 88 if NARROW else 32],  # registers of their threads
    )  # fmt: skip


_kernel = GluonKernel(
    hopper_latent_kernel,
    "(Tensor q, Tensor cache, Tensor(a!) parts, Tensor(b!) lse, Tensor plan, Tensor table,"
    " Tensor query_start, Tensor seq_lens, SymInt S) -> ()",
    warps=4,
    early=True,
)


def launch_attention(
    absorbed: Tensor, paged: PagedLatents, plan: Tensor, parts: Tensor, lse: Tensor, scale: float, *,
    block_n: int, stages: int, PROGRAMS: int, **shares: int,
) -> None:  # fmt: skip
    """As that of `triton_decode`."""
    (_, Q, H, _), (cache, *where) = parts.shape, paged
    row_tiles = -(-Q * H // 64)
    _kernel(
        PROGRAMS * row_tiles, absorbed, cache, parts, lse, plan, *where, paged.seq_lens.shape[0],
        CACHE_BLOCK=cache.stride(0), CACHE_POS=cache.stride(1), TABLE_ROW=paged.block_table.stride(0),
        SCALE=scale * math.log2(math.e), H=H, P=cache.shape[1], PROGRAMS=PROGRAMS, ROWS=min(64, power_of_2(Q * H)),
        ROW_TILES=row_tiles, STAGES=stages, **shares,
    )  # fmt: skip


def is_wide(site: CallSite) -> bool:
    """Whether the kernel takes the sizes: latents of 512 and rotated parts of 64 numbers, in 16 bits or fp8."""
    cache, q_rope = site.args["latent_cache"], site.args["q_rope_THR"]
    sizes = (site.args["latent_TL"].shape[1], q_rope.shape[2]) == (_L, _R)
    halves = cache.dtype == q_rope.dtype and q_rope.dtype in (torch.bfloat16, torch.float16)
    narrow = cache.dtype == torch.float8_e4m3fn and q_rope.dtype == torch.bfloat16
    whole = cache.is_contiguous() or (halves and cache.stride(0) % cache.stride(1) == 0 and cache.stride(1) % 8 == 0)
    return runs_gluon(site.target) and sizes and (halves or narrow) and whole and not problem(site)


def plan_wide(site: CallSite, most: int, queries: int) -> Config:
    """Launch constants for up to ``most`` sequences of up to ``queries`` query tokens: one program a processor."""
    row_tiles = -(-queries * site.args["q_rope_THR"].shape[1] // 64)
    programs = max(1, site.target.multiprocessors // row_tiles)
    return {**plan_absorbed(site, most, queries), "programs": programs, "block_n": 64, "stages": 2}


def wide_configs(site: CallSite) -> list[Config]:
    """The plan for the bucket's largest batch."""
    return [plan_wide(site, site.bucket.hi, site.bucket.query_len)]


def _serves(site: CallSite) -> bool:
    return is_wide(site) and is_absorbed(site)


@latent_attention.impl("gluon_decode", device="cuda", supports=_serves, configs=wide_configs, remedy=absorbed_problem)
def gluon_decode(rows: LatentRows, up: UpProjections, paged: PagedLatents, scale: float, **config: Any) -> Tensor:
    """Decode and verification, absorbed."""
    out_THV = rows.q_nope_THN.new_empty(*rows.q_nope_THN.shape[:2], up.v_up_HVL.shape[1])
    attend_absorbed(launch_attention, rows, up, paged, out_THV, scale, write=True, **config)
    return out_THV
