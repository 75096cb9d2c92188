"""Decode of latent attention on Hopper for up to 16 query rows of a sequence: tokens are the rows of all products.

The tensor cores take 64 rows at least. Where queries are fewer, the rows of products are the tokens of a tile in scores
and the numbers of latents in sums, so a tile costs a fraction of what `gluon_decode` pays. Two groups of warps have
tokens, a tile in shared memory, queries and sums of their own; while one computes, the tile of the other arrives.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphllm.ir import GluonKernel
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
from graphllm.ops.attention.latent_attention.operands import PagedLatents

FEW_ROWS = 16  # with 32 the kernel of 64 rows is faster
ROWS = gl.constexpr(FEW_ROWS)


@gluon.jit
def _attend(
    queries, q_rotated, latents, rotated, weights, arrived, read, full, free, program, part_ptr, lse_ptr, plan_ptr,
    query_start_ptr, seq_len_ptr, S,
    SCALE: gl.constexpr, H: gl.constexpr, Q: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """What a group of warps does with the tokens of a program of the plan."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(0, layout)
    tile, last, s, begin, end, tokens, length, _block = first_item(plan_ptr, program)
    m = gl.arange(0, ROWS, layout=of_rows)
    n = 0
    item = 0
    while tile < last:
        following = sequence(plan_ptr, query_start_ptr, seq_len_ptr, s + 1, S, PROGRAMS)
        end = gl.minimum(end, last)
        if tile < end:
            visible = length - tokens + 1 + m // H
            top = gl.full([ROWS], float("-inf"), gl.float32, layout=of_rows)
            totals = gl.zeros([TILE, ROWS], gl.float32, layout=layout)
            sum0 = gl.zeros([GROUP, ROWS], gl.float32, layout=layout)
            sum1 = gl.zeros([GROUP, ROWS], gl.float32, layout=layout)
            sum2 = gl.zeros([GROUP, ROWS], gl.float32, layout=layout)
            sum3 = gl.zeros([GROUP, ROWS], gl.float32, layout=layout)
            mbarrier.wait(arrived, item & 1)
            item += 1
            for i in range(tile - begin, end - begin):
                zero = n >> 24  # no constant, so addresses are made where they are used, not kept in registers
                at = zero * GROUPS
                scores = gl.zeros([TILE, ROWS], gl.float32, layout=layout)
                for g in gl.static_range(GROUPS):
                    mbarrier.wait(full.index(g), n & 1)
                    keys = latents.index(at + g)
                    of_queries = queries.index(at + g).permute((1, 0))
                    scores = hopper.warpgroup_mma(keys, of_queries, scores, use_acc=g > 0, is_async=True)
                of_queries = q_rotated.index(zero).permute((1, 0))
                scores = hopper.warpgroup_mma(rotated.index(zero), of_queries, scores, is_async=True)
                scores = hopper.warpgroup_mma_wait(0, deps=[scores])
                if i == end - begin - 1:
                    barrier()
                    mbarrier.arrive(read, count=1)
                token = i * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
                scores = gl.where(token[:, None] < visible[None, :], scores, float("-inf"))
                new_top = gl.maximum(top, gl.max(scores, 0) * SCALE)
                shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # later tokens may see nothing of a tile
                found = gl.exp2(scores * SCALE - shift[None, :])
                rescale = gl.exp2(top - shift)[None, :]
                top = new_top
                totals = totals * rescale + found
                of_tokens = weights.index(zero).permute((1, 0))
                of_tokens.store(found.to(weights.dtype))
                if (i + 1) * TILE > length:
                    for g in gl.static_range(GROUPS):
                        clear(latents.index(g), length - i * TILE, 16)
                hopper.fence_async_shared()
                barrier()
                sum0 = sum0 * rescale
                sum1 = sum1 * rescale
                sum2 = sum2 * rescale
                sum3 = sum3 * rescale
                values = latents.index(at + 0).permute((1, 0))
                sum0 = hopper.warpgroup_mma(values, of_tokens, sum0, is_async=True)
                values = latents.index(at + 1).permute((1, 0))
                sum1 = hopper.warpgroup_mma(values, of_tokens, sum1, is_async=True)
                values = latents.index(at + 2).permute((1, 0))
                sum2 = hopper.warpgroup_mma(values, of_tokens, sum2, is_async=True)
                values = latents.index(at + 3).permute((1, 0))
                sum3 = hopper.warpgroup_mma(values, of_tokens, sum3, is_async=True)
                sum0, sum1 = hopper.warpgroup_mma_wait(2, deps=[sum0, sum1])
                barrier()
                mbarrier.arrive(free.index(0), count=1)
                sum2, sum3 = hopper.warpgroup_mma_wait(0, deps=[sum2, sum3])
                barrier()
                mbarrier.arrive(free.index(1), count=1)
                n += 1
            total = gl.sum(totals, 0)
            factor = (1.0 / gl.where(total > 0, total, 1.0))[None, :]
            part = (program + s).to(gl.int64) * (Q * H)
            gl.store(lse_ptr + part + m, top + gl.log2(total), mask=m < tokens * H)
            e = gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
            to = part_ptr + ((part + m) * LATENT)[None, :] + e[:, None]
            valid = (m < tokens * H)[None, :]
            dtype: gl.constexpr = part_ptr.dtype.element_ty
            gl.store(to, (sum0 * factor).to(dtype), mask=valid)
            gl.store(to + GROUP, (sum1 * factor).to(dtype), mask=valid)
            gl.store(to + 2 * GROUP, (sum2 * factor).to(dtype), mask=valid)
            gl.store(to + 3 * GROUP, (sum3 * factor).to(dtype), mask=valid)
        tile = gl.maximum(tile, end)
        s += 1
        begin, end, tokens, length = following


@gluon.jit(do_not_specialize=["S"])
def hopper_few_rows_kernel(
    q_ptr, cache_ptr, part_ptr, lse_ptr, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
    CACHE_BLOCK: gl.constexpr, CACHE_POS: gl.constexpr, TABLE_ROW: gl.constexpr,
    SCALE: gl.constexpr,  # of q.k, times log2(e)
    H: gl.constexpr, P: gl.constexpr, Q: gl.constexpr,
    PROGRAMS: gl.constexpr,  # of the plan, two for each of the grid
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    TOKENS: gl.constexpr = P if P < TILE else TILE
    WIDTH: gl.constexpr = LATENT + ROTATED
    NARROW: gl.constexpr = cache_ptr.dtype.element_ty == gl.float8e4nv
    q_entries = tma.make_tensor_descriptor(q_ptr, [S * (Q * H), WIDTH], [WIDTH, 1], [ROWS, 64], shared)
    entries = cache_ptr
    if not NARROW:
        entries = tma.make_tensor_descriptor(cache_ptr, [2147483647, WIDTH], [CACHE_POS, 1], [TOKENS, 64], shared)
    queries0 = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, GROUP], shared)
    queries1 = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, GROUP], shared)
    q_rotated0 = gl.allocate_shared_memory(dtype, [1, ROWS, ROTATED], shared)
    q_rotated1 = gl.allocate_shared_memory(dtype, [1, ROWS, ROTATED], shared)
    latents0 = gl.allocate_shared_memory(dtype, [GROUPS, TILE, GROUP], shared)
    latents1 = gl.allocate_shared_memory(dtype, [GROUPS, TILE, GROUP], shared)
    rotated0 = gl.allocate_shared_memory(dtype, [1, TILE, ROTATED], shared)
    rotated1 = gl.allocate_shared_memory(dtype, [1, TILE, ROTATED], shared)
    weights0 = gl.allocate_shared_memory(dtype, [1, ROWS, TILE], shared)
    weights1 = gl.allocate_shared_memory(dtype, [1, ROWS, TILE], shared)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    read = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    full0 = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], one)
    full1 = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], one)
    free0 = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    free1 = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    for i in gl.static_range(GROUPS):
        mbarrier.init(full0.index(i), count=1)
        mbarrier.init(full1.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(free0.index(i), count=1)
        mbarrier.init(free1.index(i), count=1)
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(read.index(i), count=1)
    hopper.fence_async_shared()
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    program0 = gl.program_id(0)
    program1 = program0 + PROGRAMS // 2
    gl.warp_specialize(
        [
            (_attend, (
                queries0, q_rotated0, latents0, rotated0, weights0, arrived.index(0),
                read.index(0), full0, free0, program0, part_ptr, lse_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S,
                SCALE, H, Q, PROGRAMS,
            )),
            (_attend, (
                queries1, q_rotated1, latents1, rotated1, weights1, arrived.index(1),
                read.index(1), full1, free1, program1, part_ptr, lse_ptr, plan_ptr, query_start_ptr, seq_len_ptr, S,
                SCALE, H, Q, PROGRAMS,
            )),
            (convert_tiles if NARROW else bring_tiles, (
                entries, q_entries, queries0, q_rotated0.index(0), latents0, rotated0, arrived.index(0),
                read.index(0), full0, free0, program0, 0, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
                CACHE_BLOCK, CACHE_POS, TABLE_ROW, P, Q * H, ROWS, PROGRAMS, 1,
            )),
            (convert_tiles if NARROW else bring_tiles, (
                entries, q_entries, queries1, q_rotated1.index(0), latents1, rotated1, arrived.index(1),
                read.index(1), full1, free1, program1, 0, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
                CACHE_BLOCK, CACHE_POS, TABLE_ROW, P, Q * H, ROWS, PROGRAMS, 1,
            )),
        ],
        [4, 4, 4] if NARROW else [4, 1, 1],  # warps of the groups after the first
        [152, 104, 104] if NARROW else [208, 40, 40],  # registers of their threads; the first group has the rest
    )  # fmt: skip


_kernel = GluonKernel(
    hopper_few_rows_kernel,
    "(Tensor q, Tensor cache, Tensor(a!) parts, Tensor(b!) lse, Tensor plan, Tensor table,"
    " Tensor query_start, Tensor seq_lens, SymInt S) -> ()",
    warps=4,
    early=True,
)


def launch_few_rows(
    absorbed: Tensor, paged: PagedLatents, plan: Tensor, parts: Tensor, lse: Tensor, scale: float, *, PROGRAMS: int,
    **shares: int,
) -> None:  # fmt: skip
    """As `launch_attention` of `triton_decode`, for up to FEW_ROWS query rows of a sequence."""
    cache, *where = paged
    _kernel(
        PROGRAMS // 2, absorbed, cache, parts, lse, plan, *where, paged.seq_lens.shape[0],
        CACHE_BLOCK=cache.stride(0), CACHE_POS=cache.stride(1), TABLE_ROW=paged.block_table.stride(0),
        SCALE=scale * math.log2(math.e), H=parts.shape[2], P=cache.shape[1], PROGRAMS=PROGRAMS, **shares,
    )  # fmt: skip
