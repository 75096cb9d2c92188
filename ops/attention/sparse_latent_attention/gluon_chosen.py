"""Attention over chosen rows on Hopper: as `gluon_decode` of latent_attention, but rows are brought one by one.

A program has 64 heads of one token, and a share of its chosen rows. Two groups of four warps sum 256 numbers of the
latents each; a third one computes scores and weights of the tile after theirs; a fourth one copies the rows of tiles
into shared memory, 16 bytes at a time. Each half of a tile is free for the next one when its groups have used it.
"""

# mypy: allow-untyped-defs
# ruff: noqa: RUF005, RUF059, B007  (Gluon unpacks all or nothing)

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from graphllm.ir import CallSite, GluonKernel, runs_gluon
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_common import problem
from graphllm.ops.attention.sparse_latent_attention.op import sparse_latent_attention
from graphllm.ops.attention.sparse_latent_attention.triton_sparse import Config, attend_sparse, plan

_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # until Triton 3.6

_L, _R = 512, 64
TILE = gl.constexpr(64)  # rows of a tile, and heads of a program
HALF = gl.constexpr(256)  # numbers of a latent that a group multiplies with weights
ROTATED = gl.constexpr(64)
SOME = gl.constexpr(16)  # rows that are copied at once


@gluon.jit
def _share(counts_ptr, query_start_ptr, S, TOPK: gl.constexpr, SHARES: gl.constexpr, ROW_TILES: gl.constexpr):
    """A program's token, its share, its first head, and its first and last chosen row; none of padding."""
    program = gl.program_id(0)
    token = program // (ROW_TILES * SHARES)
    share = program // ROW_TILES % SHARES
    EACH: gl.constexpr = ((TOPK + 63) // 64 + SHARES - 1) // SHARES * 64
    count = gl.load(counts_ptr + token, mask=token < gl.load(query_start_ptr + S), other=0)
    begin = share * EACH
    return token, share, program % ROW_TILES * TILE, begin, gl.minimum(begin + EACH, count)


@gluon.jit
def _copied(full, OTHERS: gl.constexpr):
    """Say that half a tile is there, when no more than so many later ones are on their way."""
    async_copy.wait_group(OTHERS)
    hopper.fence_async_shared()
    _barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _bring_rows(
    cache_ptr, latents, rotated, full, free, slots_ptr, counts_ptr, query_start_ptr, S,
    CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, P: gl.constexpr, TOPK: gl.constexpr, SHARES: gl.constexpr,
    ROW_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the group of warps does that fills shared memory, as far ahead as there is room. Places after the last row
    have the token's first one, whose weight is 0 there."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token, share, head, begin, end = _share(counts_ptr, query_start_ptr, S, TOPK, SHARES, ROW_TILES)
    slots_ptr += token.to(gl.int64) * TOPK
    e = gl.arange(0, HALF, layout=gl.SliceLayout(0, wide))
    r = gl.arange(0, ROTATED, layout=gl.SliceLayout(0, narrow))
    n = 0
    for first in range(begin, end, TILE):
        stage = n % STAGES
        slots = ()
        for part in gl.static_range(0, TILE, SOME):
            i = first + part + gl.arange(0, SOME, layout=gl.SliceLayout(1, wide))
            slots = slots + (gl.load(slots_ptr + gl.where(i < end, i, begin)),)  # type: ignore[assignment]
        if n > 0:
            _copied(full.index((n - 1) % STAGES * 2 + 1), 0)
        for half in gl.static_range(2):
            mbarrier.wait(free.index(stage * 2 + half), ((n // STAGES) & 1) ^ 1)
            for part in gl.static_range(TILE // SOME):
                slot = slots[part]  # type: ignore[var-annotated]
                at = (slot // P).to(gl.int64) * CACHE_BLOCK + (slot % P) * CACHE_POS
                to = latents.index(stage * 2 + half).slice(part * SOME, SOME, dim=0)
                _copy(to, cache_ptr + at[:, None] + (half * HALF + e)[None, :])
                if half == 1:
                    place = gl.convert_layout(slot, gl.SliceLayout(1, narrow))
                    at = (place // P).to(gl.int64) * CACHE_BLOCK + (place % P) * CACHE_POS
                    to = rotated.index(stage).slice(part * SOME, SOME, dim=0)
                    _copy(to, cache_ptr + at[:, None] + (2 * HALF + r)[None, :])
            async_copy.commit_group()
        _copied(full.index(stage * 2), 1)
        n += 1
    if n > 0:
        _copied(full.index((n - 1) % STAGES * 2 + 1), 0)


@gluon.jit
def _load_queries(to, ptr, valid, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Query rows into shared memory, zeros where they are not valid. ptr: of each row, [64]."""
    for column in gl.static_range(0, WIDTH, 64):
        e = column + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
        found = gl.load(ptr[:, None] + e[None, :], mask=valid[:, None], other=0.0)
        to.slice(column, 64, dim=1).store(found)


@gluon.jit
def _score(
    queries, q_rotated, latents, rotated, weights, factors, full, free, given, taken, q_ptr, q_rope_ptr, lse_ptr,
    counts_ptr, query_start_ptr, S,
    ROPE_ROW: gl.constexpr, ROPE_HEAD: gl.constexpr, SCALE: gl.constexpr, H: gl.constexpr, TOPK: gl.constexpr,
    SHARES: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the group of warps does that multiplies queries with keys: it gives weights of tiles to the other groups,
    and with them what their sums are to be multiplied by; after the last tile, one over the weights' sum."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token, share, head, begin, end = _share(counts_ptr, query_start_ptr, S, TOPK, SHARES, ROW_TILES)
    own = head + gl.arange(0, TILE, layout=gl.SliceLayout(1, wide))
    row = token.to(gl.int64) * H + own
    for half in gl.static_range(2):
        _load_queries(queries.index(half), q_ptr + row * (2 * HALF) + half * HALF, own < H, HALF, wide)
    _load_queries(q_rotated, q_rope_ptr + token.to(gl.int64) * ROPE_ROW + own * ROPE_HEAD, own < H, ROTATED, wide)
    hopper.fence_async_shared()
    _barrier()
    top = gl.full([TILE], float("-inf"), gl.float32, layout=gl.SliceLayout(1, layout))
    total = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, layout))
    n = 0
    for first in range(begin, end, TILE):
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
        at = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        scores = gl.where((at < end)[None, :], scores, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1) * SCALE)
        found = gl.exp2(scores * SCALE - new_top[:, None])
        rescale = gl.exp2(top - new_top)
        total = total * rescale + gl.sum(found, 1)
        top = new_top
        mbarrier.wait(taken, (n & 1) ^ 1)
        weights.store(found.to(weights.dtype))
        factors.store(rescale)
        hopper.fence_async_shared()
        _barrier()
        mbarrier.arrive(given, count=1)
        n += 1
    mbarrier.wait(taken, (n & 1) ^ 1)
    factors.store(1.0 / gl.where(total > 0, total, 1.0))
    _barrier()
    mbarrier.arrive(given, count=1)
    m = head + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    cell = (token.to(gl.int64) * SHARES + share) * H + m
    gl.store(lse_ptr + cell, top + gl.log2(total), mask=m < H)


@gluon.jit
def _sum_values(
    latents, weights, factors, full, free, given, taken, part_ptr, counts_ptr, query_start_ptr, S,
    H: gl.constexpr, TOPK: gl.constexpr, SHARES: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of warps does that sums one half of the latents."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    token, share, head, begin, end = _share(counts_ptr, query_start_ptr, S, TOPK, SHARES, ROW_TILES)
    acc = gl.zeros([TILE, HALF], gl.float32, layout=layout)
    n = 0
    for first in range(begin, end, TILE):
        stage = n % STAGES
        mbarrier.wait(given, n & 1)
        mbarrier.wait(full.index(stage * 2 + GROUP), (n // STAGES) & 1)
        acc = acc * factors.load(gl.SliceLayout(1, layout))[:, None]
        acc = hopper.warpgroup_mma(weights, latents.index(stage * 2 + GROUP), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(free.index(stage * 2 + GROUP), count=1)
        n += 1
    mbarrier.wait(given, n & 1)
    acc = acc * factors.load(gl.SliceLayout(1, layout))[:, None]
    m = head + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    cell = (token.to(gl.int64) * SHARES + share) * H + m
    e = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    to = part_ptr + (cell * (2 * HALF))[:, None] + e[None, :]
    gl.store(to, acc.to(part_ptr.dtype.element_ty), mask=(m < H)[:, None])


@gluon.jit(do_not_specialize=["S"])
def hopper_chosen_kernel(
    q_ptr, q_rope_ptr, cache_ptr, slots_ptr, counts_ptr, part_ptr, lse_ptr, query_start_ptr, S,
    ROPE_ROW: gl.constexpr, ROPE_HEAD: gl.constexpr, CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr,
    SCALE: gl.constexpr,  # of q.k, times log2(e)
    H: gl.constexpr, P: gl.constexpr, TOPK: gl.constexpr, SHARES: gl.constexpr,
    ROW_TILES: gl.constexpr,  # programs for all heads of a token
    STAGES: gl.constexpr,  # tiles in shared memory
):  # fmt: skip
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
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
                lse_ptr, counts_ptr, query_start_ptr, S, ROPE_ROW, ROPE_HEAD, SCALE, H, TOPK, SHARES, ROW_TILES,
                STAGES,
            )),
            (_sum_values, (
                latents, weights, factors, full, free, given, taken, part_ptr, counts_ptr, query_start_ptr, S, H, TOPK,
                SHARES, ROW_TILES, STAGES, 0,
            )),
            (_sum_values, (
                latents, weights, factors, full, free, given, taken, part_ptr, counts_ptr, query_start_ptr, S, H, TOPK,
                SHARES, ROW_TILES, STAGES, 1,
            )),
            (_bring_rows, (
                cache_ptr, latents, rotated, full, free, slots_ptr, counts_ptr, query_start_ptr, S, CACHE_BLOCK,
                CACHE_POS, P, TOPK, SHARES, ROW_TILES, STAGES,
            )),
        ],
        [4, 4, 4],  # warps of the groups after the first
        [176, 176, 56],  # registers of their threads; the first group has the rest
    )  # fmt: skip


_kernel = GluonKernel(
    hopper_chosen_kernel,
    "(Tensor q, Tensor q_rope, Tensor cache, Tensor slots, Tensor counts, Tensor(a!) parts, Tensor(b!) lse,"
    " Tensor query_start, SymInt S) -> ()",
    warps=4,
    early=True,
)


def attend_chosen(
    absorbed: Tensor, q_rope: Tensor, paged: PagedLatents, slots: Tensor, counts: Tensor, parts: Tensor, lse: Tensor,
    scale: float, *, stages: int,
) -> None:  # fmt: skip
    """As that of `triton_chosen`; of a share without rows, parts are zeros."""
    (T, shares, H, _), cache = parts.shape, paged.latent_cache
    row_tiles = -(-H // 64)
    _kernel(
        T * shares * row_tiles, absorbed, q_rope, cache, slots, counts, parts, lse, paged.query_start_loc,
        paged.seq_lens.shape[0], ROPE_ROW=q_rope.stride(0), ROPE_HEAD=q_rope.stride(1), CACHE_BLOCK=cache.stride(0),
        CACHE_POS=cache.stride(1), SCALE=scale * math.log2(math.e), H=H, P=cache.shape[1], TOPK=slots.shape[1],
        SHARES=shares, ROW_TILES=row_tiles, STAGES=stages,
    )  # fmt: skip


def is_wide(site: CallSite) -> bool:
    """Whether the kernel serves the site: latents of 512 and rotated parts of 64 numbers, in a cache of 16 bits."""
    cache, q_rope = site.args["latent_cache"], site.args["q_rope_THR"]
    sizes = (site.args["latent_TL"].shape[1], q_rope.shape[2]) == (_L, _R)
    halves = cache.dtype == q_rope.dtype and q_rope.dtype in (torch.bfloat16, torch.float16)
    whole = cache.stride(0) % 8 == 0 and cache.stride(1) % 8 == 0
    return runs_gluon(site.target) and sizes and halves and whole


def _configs(site: CallSite) -> list[Config]:
    return [{**plan(site), "attend": {"stages": 2}}]


@sparse_latent_attention.impl("gluon_sparse", device="cuda", supports=is_wide, configs=_configs, remedy=problem)
def gluon_sparse(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, chosen_TK: Tensor, scale: float, **config: Any
) -> Tensor:
    """Decode and prompts alike."""
    return attend_sparse(attend_chosen, rows, up, paged, chosen_TK, scale, **config)
