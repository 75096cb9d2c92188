"""Decode and verification of latent attention on Hopper: a tile of the cache is both keys and values.

A program's output, 64 query rows by 512 numbers, is half of a multiprocessor's registers. Two groups of four warps have
256 numbers each; a third one computes scores and weights of the tile after theirs, which it hands over in shared
memory; a warp brings tiles by the TMA unit. Each half of a tile is free for the next one when its group has used it.
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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphllm.ir import CallSite, GluonKernel, runs_gluon
from graphllm.ops.attention.latent_attention.op import latent_attention
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_absorb import (
    Config,
    attend_absorbed,
    is_absorbed,
    plan_decode,
)
from graphllm.ops.attention.latent_attention.triton_common import problem

_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # until Triton 3.6

_L, _R = 512, 64
TILE = gl.constexpr(64)  # tokens of a tile, and query rows of a program
HALF = gl.constexpr(256)  # numbers of a latent that a group multiplies with weights
ROTATED = gl.constexpr(64)


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
def _sequence(plan_ptr, s, last, PROGRAMS: gl.constexpr):
    """The first tile of a sequence, and one past the last that the program has."""
    begin = gl.load(plan_ptr + PROGRAMS + s)
    return begin, gl.minimum(gl.load(plan_ptr + PROGRAMS + s + 1), last)


@gluon.jit
def _cache_rows(
    table_row, i, length, CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """In which rows of the cache the blocks of a sequence's i-th tile begin. The last one that it owns stands for
    those beyond its length."""
    rows = ()
    for part in gl.static_range(PARTS):
        position = i * TILE + part * P
        block = gl.load(table_row + gl.minimum(position, length - 1) // P)
        rows = rows + (block * (CACHE_BLOCK // CACHE_POS) + position % P,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _bring_tiles(
    entries, latents, rotated, full, free, plan_ptr, table_ptr, seq_len_ptr, S,
    CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, TABLE_ROW: gl.constexpr, P: gl.constexpr,
    PROGRAMS: gl.constexpr, MIN_TILES: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room."""
    PARTS: gl.constexpr = TILE // P if P < TILE else 1
    TOKENS: gl.constexpr = TILE // PARTS
    program, tile, last, s = _first_item(plan_ptr, S, PROGRAMS, MIN_TILES, ROW_TILES)
    n = 0
    while tile < last:
        begin, end = _sequence(plan_ptr, s, last, PROGRAMS)
        length = gl.load(seq_len_ptr + s)
        table_row = table_ptr + s.to(gl.int64) * TABLE_ROW
        if tile < end:
            rows = _cache_rows(table_row, tile - begin, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
            for i in range(tile - begin, end - begin):
                following = _cache_rows(table_row, i + 1, length, CACHE_BLOCK, CACHE_POS, P, PARTS)
                stage = n % STAGES
                for half in gl.static_range(2):
                    arrived = full.index(stage * 2 + half)
                    mbarrier.wait(free.index(stage * 2 + half), ((n // STAGES) & 1) ^ 1)
                    mbarrier.expect(arrived, TILE * (HALF + ROTATED * half) * 2)
                    for part in gl.static_range(PARTS):
                        for column in gl.static_range(0, HALF, 64):
                            to = latents.index(stage * 2 + half).slice(part * TOKENS, TOKENS, dim=0)
                            to = to.slice(column, 64, dim=1)
                            _load_tile(entries, [rows[part], half * HALF + column], arrived, to)
                        if half == 1:
                            to = rotated.index(stage).slice(part * TOKENS, TOKENS, dim=0)
                            _load_tile(entries, [rows[part], 2 * HALF], arrived, to)
                rows = following
                n += 1
        tile = gl.maximum(tile, end)
        s += 1


@gluon.jit
def _load_queries(to, ptr, row, valid, ROW: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Query rows into shared memory, zeros where they are not valid."""
    for column in gl.static_range(0, WIDTH, 64):
        e = column + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
        found = gl.load(ptr + (row * ROW)[:, None] + e[None, :], mask=valid[:, None], other=0.0)
        to.slice(column, 64, dim=1).store(found)


@gluon.jit
def _score(
    queries, q_rotated, latents, rotated, weights, factors, full, free, given, taken, q_ptr, q_rope_ptr, lse_ptr,
    plan_ptr, query_start_ptr, seq_len_ptr, S,
    ROPE_ROW: gl.constexpr, ROPE_HEAD: gl.constexpr, SCALE: gl.constexpr, H: gl.constexpr, Q: gl.constexpr,
    PROGRAMS: gl.constexpr, MIN_TILES: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the group of warps does that multiplies queries with keys: it gives weights of tiles to the other groups,
    and with them what their sums are to be multiplied by; after a sequence's last tile, one over the weights' sum."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    program, tile, last, s = _first_item(plan_ptr, S, PROGRAMS, MIN_TILES, ROW_TILES)
    first_m = gl.program_id(0) % ROW_TILES * TILE
    n = 0
    step = 0
    while tile < last:
        begin, end = _sequence(plan_ptr, s, last, PROGRAMS)
        if tile < end:
            row0 = gl.load(query_start_ptr + s)
            tokens = gl.load(query_start_ptr + s + 1) - row0
            length = gl.load(seq_len_ptr + s)
            m = first_m + gl.arange(0, TILE, layout=gl.SliceLayout(1, wide))
            valid = m < tokens * H
            own = s.to(gl.int64) * (Q * H) + m
            for half in gl.static_range(2):
                _load_queries(queries.index(half), q_ptr + half * HALF, own, valid, 2 * HALF, HALF, wide)
            rope_row = (row0 + m // H).to(gl.int64) * ROPE_ROW + m % H * ROPE_HEAD
            _load_queries(q_rotated, q_rope_ptr, rope_row, valid, 1, ROTATED, wide)
            hopper.fence_async_shared()
            _barrier()
            m = first_m + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
            visible = length - tokens + 1 + m // H
            top = gl.full([TILE], float("-inf"), gl.float32, layout=gl.SliceLayout(1, layout))
            total = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, layout))
            for i in range(tile - begin, end - begin):
                stage = n % STAGES
                scores = gl.zeros([TILE, TILE], gl.float32, layout=layout)
                for half in gl.static_range(2):
                    mbarrier.wait(full.index(stage * 2 + half), (n // STAGES) & 1)
                    keys = latents.index(stage * 2 + half).permute((1, 0))
                    scores = hopper.warpgroup_mma(queries.index(half), keys, scores, use_acc=half > 0, is_async=True)
                scores = hopper.warpgroup_mma(q_rotated, rotated.index(stage).permute((1, 0)), scores, is_async=True)
                scores = hopper.warpgroup_mma_wait(0, deps=[scores])
                _barrier()
                mbarrier.arrive(free.index(stage * 2), count=1)
                mbarrier.arrive(free.index(stage * 2 + 1), count=1)
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


@gluon.jit
def _sum_values(
    latents, weights, factors, free, given, taken, part_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S,
    H: gl.constexpr, Q: gl.constexpr, PROGRAMS: gl.constexpr, MIN_TILES: gl.constexpr, ROW_TILES: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of warps does that sums one half of the latents."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    program, tile, last, s = _first_item(plan_ptr, S, PROGRAMS, MIN_TILES, ROW_TILES)
    m = gl.program_id(0) % ROW_TILES * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    n = 0
    step = 0
    while tile < last:
        begin, end = _sequence(plan_ptr, s, last, PROGRAMS)
        if tile < end:
            tokens = gl.load(query_start_ptr + s + 1) - gl.load(query_start_ptr + s)
            length = gl.load(seq_len_ptr + s)
            acc = gl.zeros([TILE, HALF], gl.float32, layout=layout)
            for i in range(tile - begin, end - begin):
                stage = n % STAGES
                values = latents.index(stage * 2 + GROUP)
                mbarrier.wait(given, step & 1)
                acc = acc * factors.load(gl.SliceLayout(1, layout))[:, None]
                if (i + 1) * TILE > length:  # no row sees them, but 0 * NaN is NaN
                    for column in gl.static_range(0, TILE, 16):
                        some = values.slice(column, 16, dim=0)
                        beyond = i * TILE + column + gl.arange(0, 16, layout=gl.SliceLayout(1, wide)) >= length
                        found = some.load(wide)
                        some.store(gl.where(beyond[:, None], gl.zeros_like(found), found))
                    hopper.fence_async_shared()
                    _barrier()
                acc = hopper.warpgroup_mma(weights, values, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                _barrier()
                mbarrier.arrive(taken, count=1)
                mbarrier.arrive(free.index(stage * 2 + GROUP), count=1)
                n += 1
                step += 1
            mbarrier.wait(given, step & 1)
            acc = acc * factors.load(gl.SliceLayout(1, layout))[:, None]
            _barrier()
            mbarrier.arrive(taken, count=1)
            step += 1
            part = (program + s).to(gl.int64) * (Q * H) + m
            e = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
            to = part_ptr + (part * (2 * HALF))[:, None] + e[None, :]
            gl.store(to, acc.to(part_ptr.dtype.element_ty), mask=(m < tokens * H)[:, None])
        tile = gl.maximum(tile, end)
        s += 1


@gluon.jit(do_not_specialize=["S"])
def hopper_latent_kernel(
    q_ptr, q_rope_ptr, cache_ptr, part_ptr, lse_ptr, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
    ROPE_ROW: gl.constexpr, ROPE_HEAD: gl.constexpr, CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr,
    TABLE_ROW: gl.constexpr,
    SCALE: gl.constexpr,  # of q.k, times log2(e)
    H: gl.constexpr, P: gl.constexpr, Q: gl.constexpr, MIN_TILES: gl.constexpr, PROGRAMS: gl.constexpr,
    ROW_TILES: gl.constexpr,  # programs for all query rows of a sequence
    STAGES: gl.constexpr,  # tiles in shared memory
):  # fmt: skip
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    TOKENS: gl.constexpr = P if P < TILE else TILE
    entries = tma.make_tensor_descriptor(
        cache_ptr, [2147483647, 2 * HALF + ROTATED], [CACHE_POS, 1], [TOKENS, 64], shared
    )
    queries = gl.allocate_shared_memory(dtype, [2, TILE, HALF], shared)
    q_rotated = gl.allocate_shared_memory(dtype, [TILE, ROTATED], shared)
    latents = gl.allocate_shared_memory(dtype, [STAGES * 2, TILE, HALF], shared)
    rotated = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROTATED], shared)
    weights = gl.allocate_shared_memory(dtype, [TILE, TILE], shared)
    factors = gl.allocate_shared_memory(gl.float32, [TILE], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], one)
    given = gl.allocate_shared_memory(gl.int64, [1], one)
    taken = gl.allocate_shared_memory(gl.int64, [1], one)
    for i in gl.static_range(STAGES * 2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=2)
    hopper.fence_async_shared()
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.warp_specialize(
        [
            (_score, (
                queries, q_rotated, latents, rotated, weights, factors, full, free, given, taken, q_ptr, q_rope_ptr,
                lse_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S, ROPE_ROW, ROPE_HEAD, SCALE, H, Q, PROGRAMS,
                MIN_TILES, ROW_TILES, STAGES,
            )),
            (_sum_values, (
                latents, weights, factors, free, given, taken, part_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S, H,
                Q, PROGRAMS, MIN_TILES, ROW_TILES, STAGES, 0,
            )),
            (_sum_values, (
                latents, weights, factors, free, given, taken, part_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S, H,
                Q, PROGRAMS, MIN_TILES, ROW_TILES, STAGES, 1,
            )),
            (_bring_tiles, (
                entries, latents, rotated, full, free, plan_ptr, table_ptr, seq_len_ptr, S, CACHE_BLOCK, CACHE_POS,
                TABLE_ROW, P, PROGRAMS, MIN_TILES, ROW_TILES, STAGES,
            )),
        ],
        [4, 4, 1],  # warps of the groups after the first, and of what fills shared memory
        [184, 184, 32],  # registers of their threads; the first group has the rest
    )  # fmt: skip


_kernel = GluonKernel(
    hopper_latent_kernel,
    "(Tensor q, Tensor q_rope, Tensor cache, Tensor(a!) parts, Tensor(b!) lse, Tensor plan, Tensor table,"
    " Tensor query_start, Tensor seq_lens, SymInt S) -> ()",
    warps=4,
    early=True,
)


def launch_attention(
    absorbed: Tensor, q_rope: Tensor, paged: PagedLatents, plan: Tensor, parts: Tensor, lse: Tensor, scale: float, *,
    block_n: int, stages: int, PROGRAMS: int, **shares: int,
) -> None:  # fmt: skip
    """As that of `triton_decode`."""
    (_, Q, H, _), (cache, *where) = parts.shape, paged
    row_tiles = -(-Q * H // 64)
    _kernel(
        PROGRAMS * row_tiles, absorbed, q_rope, cache, parts, lse, plan, *where, paged.seq_lens.shape[0],
        ROPE_ROW=q_rope.stride(0), ROPE_HEAD=q_rope.stride(1), CACHE_BLOCK=cache.stride(0), CACHE_POS=cache.stride(1),
        TABLE_ROW=paged.block_table.stride(0), SCALE=scale * math.log2(math.e), H=H, P=cache.shape[1],
        PROGRAMS=PROGRAMS, ROW_TILES=row_tiles, STAGES=stages, **shares,
    )  # fmt: skip


def is_wide(site: CallSite) -> bool:
    """Whether the kernel serves the site: latents of 512 and rotated parts of 64 numbers, in a cache of 16 bits, and no
    trees of drafts."""
    cache, q_rope = site.args["latent_cache"], site.args["q_rope_THR"]
    sizes = (site.args["latent_TL"].shape[1], q_rope.shape[2]) == (_L, _R)
    halves = cache.dtype == q_rope.dtype and q_rope.dtype in (torch.bfloat16, torch.float16)
    whole = cache.stride(0) % cache.stride(1) == 0 and cache.stride(1) % 8 == 0
    chain = site.args["ancestors_T"] is None
    return runs_gluon(site.target) and sizes and halves and whole and chain and is_absorbed(site)


def wide_configs(site: CallSite) -> list[Config]:
    """One program a processor."""
    plan = plan_decode(site, site.bucket.hi, site.bucket.query_len)
    row_tiles = -(-site.bucket.query_len * site.args["q_rope_THR"].shape[1] // 64)
    kept = {k: v for k, v in plan.items() if k not in ("block_m", "warps")}
    return [{**kept, "programs": max(1, site.target.multiprocessors // row_tiles), "block_n": 64, "stages": 2}]


@latent_attention.impl("gluon_decode", device="cuda", supports=is_wide, configs=wide_configs, remedy=problem)
def gluon_decode(rows: LatentRows, up: UpProjections, paged: PagedLatents, scale: float, **config: Any) -> Tensor:
    """Decode and verification, absorbed."""
    out_THV = rows.q_nope_THN.new_empty(*rows.q_nope_THN.shape[:2], up.v_up_HVL.shape[1])
    attend_absorbed(launch_attention, rows, up, paged, out_THV, scale, write=True, **config)
    return out_THV
