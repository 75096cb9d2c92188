"""Decode and verification of latent attention on Hopper: a tile of the cache is both keys and values.

A program's output, 64 query rows by 512 numbers, is half of a multiprocessor's registers. Two groups of four warps have
256 numbers each. A third one computes scores and weights of the tile after theirs; it hands weights over in shared
memory where the tile's rotated part was, so neither waits for the other. A warp brings tiles by the TMA unit.
`gluon_few_rows` has the kernel for few query rows, `triton_decode` the one for all other GPUs and cases;
`triton_absorb` says how sequences are divided.
"""

# mypy: allow-untyped-defs

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
from graphllm.ops.attention.latent_attention.decode.gluon_few_rows import FEW_ROWS, launch_few_rows
from graphllm.ops.attention.latent_attention.decode.gluon_tiles import (
    GROUP,
    GROUPS,
    LATENT,
    ROTATED,
    TILE,
    barrier,
    bring_tiles,
    clear,
    convert_tiles,
    first_item,
    sequence,
)
from graphllm.ops.attention.latent_attention.op import latent_attention
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_absorb import (
    Config,
    attend_absorbed,
    is_absorbed,
    plan_absorbed,
)
from graphllm.ops.attention.latent_attention.triton_common import problem
from graphllm.ops.attention.paged_attention.triton_common import power_of_2

_L, _R = 512, 64


@gluon.jit
def _score(
    queries, q_rotated, latents, rotated, factors, shares, arrived, read, full, given, ended, noted, program, first_m,
    lse_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S,
    SCALE: gl.constexpr, H: gl.constexpr, Q: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the group of warps does that multiplies queries with keys. It gives the other groups the weights of a tile,
    in place of its rotated part, and what their sums are to be multiplied by; after a sequence's last tile, one over
    the weights' sum."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    tile, last, s, begin, end, tokens, length, _block = first_item(plan_ptr, program)
    n = 0
    item = 0
    while tile < last:
        following = sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        if tile < end:
            mbarrier.wait(arrived, item & 1)
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
                if (i + 1) * TILE > length - tokens:
                    at = i * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
                    scores = gl.where(at[None, :] < visible[:, None], scores, float("-inf"))
                new_top = gl.maximum(top, gl.max(scores, 1) * SCALE)
                shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # later tokens may see nothing of a tile
                found = gl.exp2(scores * SCALE - shift[:, None])
                rescale = gl.exp2(top - shift)
                top = new_top
                barrier()  # all have read the rotated part
                rotated.index(stage).store(found.to(rotated.dtype))
                factors.index(stage).store(rescale)
                hopper.fence_async_shared()
                barrier()
                mbarrier.arrive(given.index(stage), count=1)
                total = total * rescale + gl.sum(found, 1)
                if i == end - begin - 1:
                    mbarrier.arrive(read, count=1)
                n += 1
            mbarrier.wait(noted, (item & 1) ^ 1)
            shares.store(1.0 / gl.where(total > 0, total, 1.0))
            barrier()
            mbarrier.arrive(ended, count=1)
            item += 1
            part = (program + s).to(gl.int64) * (Q * H) + m
            gl.store(lse_ptr + part, top + gl.log2(total), mask=m < tokens * H)
        tile = gl.maximum(tile, end)
        s += 1
        begin, end, tokens, length = following


@gluon.jit
def _sum_values(
    latents, rotated, factors, shares, free, given, ended, noted, program, first_m, part_ptr, plan_ptr,
    query_start_ptr, seq_len_ptr, S,
    H: gl.constexpr, Q: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """What a group of warps does that sums one half of the latents, two groups of numbers from FIRST on."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    tile, last, s, begin, end, tokens, length, _block = first_item(plan_ptr, program)
    m = first_m + gl.arange(0, TILE, layout=of_rows)
    n = 0
    item = 0
    while tile < last:
        following = sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        if tile < end:
            low = gl.zeros([TILE, GROUP], gl.float32, layout=layout)
            high = gl.zeros([TILE, GROUP], gl.float32, layout=layout)
            for i in range(tile - begin, end - begin):
                stage = n % STAGES
                at = stage * GROUPS + FIRST
                mbarrier.wait(given.index(stage), (n // STAGES) & 1)
                rescale = factors.index(stage).load(of_rows)[:, None]
                low = low * rescale
                high = high * rescale
                if (i + 1) * TILE > length:
                    clear(latents.index(at), length - i * TILE, 16)
                    clear(latents.index(at + 1), length - i * TILE, 16)
                    hopper.fence_async_shared()
                    barrier()
                low = hopper.warpgroup_mma(rotated.index(stage), latents.index(at), low, is_async=True)
                high = hopper.warpgroup_mma(rotated.index(stage), latents.index(at + 1), high, is_async=True)
                low, high = hopper.warpgroup_mma_wait(0, deps=[low, high])
                barrier()
                mbarrier.arrive(free.index(at // 2), count=1)
                n += 1
            mbarrier.wait(ended, item & 1)
            item += 1
            factor = shares.load(of_rows)[:, None]
            barrier()
            mbarrier.arrive(noted, count=1)
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
    H: gl.constexpr, P: gl.constexpr, Q: gl.constexpr, PROGRAMS: gl.constexpr,
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
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], flat)
    shares = gl.allocate_shared_memory(gl.float32, [TILE], flat)
    arrived = gl.allocate_shared_memory(gl.int64, [1], one)
    read = gl.allocate_shared_memory(gl.int64, [1], one)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * GROUPS, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], one)
    given = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    ended = gl.allocate_shared_memory(gl.int64, [1], one)
    noted = gl.allocate_shared_memory(gl.int64, [1], one)
    for i in gl.static_range(STAGES * GROUPS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES * 2):  # whoever sums values has weights of all scores: those are read, too
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(arrived, count=1)
    mbarrier.init(read, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(given.index(i), count=1)
    mbarrier.init(ended, count=1)
    mbarrier.init(noted, count=2)
    hopper.fence_async_shared()
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    program = gl.program_id(0) // ROW_TILES
    first_m = gl.program_id(0) % ROW_TILES * TILE
    gl.warp_specialize(
        [
            (_score, (
                queries, q_rotated, latents, rotated, factors, shares, arrived, read, full, given, ended, noted,
                program, first_m, lse_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S, SCALE, H, Q, PROGRAMS, STAGES,
            )),
            (_sum_values, (
                latents, rotated, factors, shares, free, given, ended, noted, program, first_m, part_ptr, plan_ptr,
                query_start_ptr, seq_len_ptr, S, H, Q, PROGRAMS, STAGES, 0,
            )),
            (_sum_values, (
                latents, rotated, factors, shares, free, given, ended, noted, program, first_m, part_ptr, plan_ptr,
                query_start_ptr, seq_len_ptr, S, H, Q, PROGRAMS, STAGES, 2,
            )),
            (convert_tiles if NARROW else bring_tiles, (
                entries, q_entries, queries, q_rotated, latents, rotated, arrived, read, full, free, program, first_m,
                plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S, CACHE_BLOCK, CACHE_POS, TABLE_ROW, P, Q * H, ROWS,
                PROGRAMS, STAGES,
            )),
        ],
        [4, 4, 4 if NARROW else 1],  # warps of the groups after the first, and of what fills shared memory
        [160 if NARROW else 184, 160 if NARROW else 184, 112 if NARROW else 32],  # registers of their threads
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
    """As that of `triton_decode`, by the kernel for so many rows."""
    (_, Q, H, _), (cache, *where) = parts.shape, paged
    if Q * H <= FEW_ROWS:
        launch_few_rows(absorbed, paged, plan, parts, lse, scale, PROGRAMS=PROGRAMS, **shares)
        return
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
    """Launch constants for up to ``most`` sequences of up to ``queries`` query tokens: one program a processor, which
    does two of the plan's where rows are few."""
    rows = queries * site.args["q_rope_THR"].shape[1]
    programs = site.target.multiprocessors * 2 if rows <= FEW_ROWS else site.target.multiprocessors // -(-rows // 64)
    return {**plan_absorbed(site, most, queries), "programs": max(1, programs), "block_n": 64, "stages": 2}


def wide_configs(site: CallSite) -> list[Config]:
    """The plan for the bucket's largest batch."""
    return [plan_wide(site, site.bucket.hi, site.bucket.query_len)]


def _serves(site: CallSite) -> bool:
    """Decode and verification without trees of drafts."""
    return is_wide(site) and site.args["ancestors_T"] is None and is_absorbed(site)


@latent_attention.impl("gluon_decode", device="cuda", supports=_serves, configs=wide_configs, remedy=problem)
def gluon_decode(rows: LatentRows, up: UpProjections, paged: PagedLatents, scale: float, **config: Any) -> Tensor:
    """Decode and verification, absorbed."""
    out_THV = rows.q_nope_THN.new_empty(*rows.q_nope_THN.shape[:2], up.v_up_HVL.shape[1])
    attend_absorbed(launch_attention, rows, up, paged, out_THV, scale, write=True, **config)
    return out_THV
