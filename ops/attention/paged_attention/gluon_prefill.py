"""Ragged batches on Hopper: prompts by the warp-specialized kernel of this file, few tokens as in decode.

`gluon_flash` and `gluon_flash_ranges` have what its groups of warps do for a tile: the fastest way, or each row as if
it were the only one. `triton_prefill` and `triton_ranges` have the same for all other GPUs and cases.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102, RUF059  (a branch on a constexpr joins no other condition; Gluon unpacks all or nothing)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphllm.ir import CallSite, GluonKernel, runs_gluon
from graphllm.ops.attention.paged_attention.gluon_flash import (
    attend_tiles,
    bring_tiles,
    clear_values,
    find_item,
    first_scores,
    item_tiles,
    nth_item,
    softmax,
    store_queries,
    write_rows,
)
from graphllm.ops.attention.paged_attention.gluon_flash_ranges import attend_range_tiles, join, store_queries_alike
from graphllm.ops.attention.paged_attention.op import paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rotary, Rows, Scores
from graphllm.ops.attention.paged_attention.triton_common import problem, rotary_arguments, score_constants
from graphllm.ops.attention.paged_attention.triton_decode import Config
from graphllm.ops.attention.paged_attention.triton_range_kernel import (
    RANGE,
    SINGLE,
    in_ranges,
    launch_ranges,
    range_order,
)
from graphllm.ops.attention.paged_attention.triton_verify import is_mixed, launch_few, plan_few
from graphllm.ops.attention.paged_attention.triton_write import write_rows as store_rows


@gluon.jit
def _attend(
    all_queries, keys, values, k_full, k_free, v_full, v_free, turn, q_ptr, out_ptr, query_start_ptr, seq_len_ptr,
    q_norm_ptr, cos_ptr, sin_ptr, sinks_ptr, S, items, few,
    Q_ROW: gl.constexpr, Q_HEAD: gl.constexpr, SCALE: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    K: gl.constexpr, G: gl.constexpr, E: gl.constexpr, BLOCK_N: gl.constexpr, RANGE: gl.constexpr,
    STAGES: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr, EPS: gl.constexpr, SINKS: gl.constexpr,
    TURNS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: attention for 64 of the rows of each item, tiles from the last to the first, or,
    with ranges, from the first to the last."""
    BLOCK_Q: gl.constexpr = 128 // G
    dtype: gl.constexpr = keys.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [512 // E, E // 16], [4, 1], [1, 0])
    queries_of_group = all_queries.index(GROUP)
    q_parts = (queries_of_group,)
    k_parts = (keys,)
    n_tile = 0
    _, row0, queries, length, skip = find_item(nth_item(0), items, query_start_ptr, seq_len_ptr, S, K, BLOCK_Q)
    for n in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = nth_item(n)
        next_row0 = row0
        next_queries = queries
        next_length = length
        next_skip = skip
        if (item < items) & (queries > few) & (skip < queries):
            begin, first, inner, full, last = item_tiles(queries, length, skip, WINDOW, BLOCK_Q, BLOCK_N)
            head = item % K
            if RANGE > 0 or (F > 0 and 2 * F < E):
                store_queries_alike(
                    queries_of_group, q_ptr, q_norm_ptr, cos_ptr, sin_ptr, row0, queries, skip, head, GROUP, Q_ROW,
                    Q_HEAD, G, E, F, NORM, EPS, WINDOW,
                )  # fmt: skip
            else:
                m = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, q_layout))
                token = skip + m // G
                valid = (m < BLOCK_Q * G) & (token < queries)
                store_queries(
                    queries_of_group, q_ptr, q_norm_ptr, cos_ptr, sin_ptr, (row0 + token).to(gl.int64),
                    head * G + m % G, valid, Q_ROW, Q_HEAD, E, F, NORM, EPS, q_layout,
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
            scores = first_scores(q_parts, k_parts, k_full, k_free, turn, n_tile, BLOCK_N, STAGES, TURNS, GROUP, layout)
            if RANGE > 0:
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
                    n_tile, weights, acc, top, total, joined, joined_top, joined_total = attend_range_tiles(
                        second, whole, last, n_tile, weights, acc, top, total, joined, joined_top, joined_total,
                        position, q_parts, k_parts, values, k_full, k_free, v_full, v_free, turn, True, WINDOW,
                        SCALE, BLOCK_N, RANGE, STAGES, TURNS, GROUP, out_layout, layout,
                    )  # fmt: skip
                n_tile, weights, acc, top, total, joined, joined_top, joined_total = attend_range_tiles(
                    whole, full, last, n_tile, weights, acc, top, total, joined, joined_top, joined_total, position,
                    q_parts, k_parts, values, k_full, k_free, v_full, v_free, turn, False, WINDOW, SCALE, BLOCK_N,
                    RANGE, STAGES, TURNS, GROUP, out_layout, layout,
                )  # fmt: skip
                n_tile, weights, acc, top, total, joined, joined_top, joined_total = attend_range_tiles(
                    gl.maximum(full, whole), last, last, n_tile, weights, acc, top, total, joined, joined_top,
                    joined_total, position, q_parts, k_parts, values, k_full, k_free, v_full, v_free, turn, True,
                    WINDOW, SCALE, BLOCK_N, RANGE, STAGES, TURNS, GROUP, out_layout, layout,
                )  # fmt: skip
            else:
                new, top, total, rescale = softmax(
                    scores, top, total, position, last - 1, True, WINDOW, SCALE, BLOCK_N, False, layout
                )
                weights = gl.convert_layout(new.to(dtype), weights_layout)
                if last * BLOCK_N > length:
                    mbarrier.wait(v_full.index(stage), (n_tile // STAGES) & 1)
                    clear_values(values.index(stage), 0, length - (last - 1) * BLOCK_N, BLOCK_N, E)
                mbarrier.wait(k_full.index((n_tile + 1) % STAGES), ((n_tile + 1) // STAGES) & 1, pred=last - 1 > first)
                n_tile, weights, acc, top, total = attend_tiles(
                    gl.minimum(gl.maximum(full, first), last - 1), last - 1, first, n_tile, weights, acc, top, total,
                    position, q_parts, k_parts, values, k_full, k_free, v_full, v_free, turn, True, WINDOW,
                    SCALE, BLOCK_N, STAGES, TURNS, GROUP, out_layout, layout,
                )  # fmt: skip
                n_tile, weights, acc, top, total = attend_tiles(
                    inner, gl.minimum(full, last - 1), first, n_tile, weights, acc, top, total,
                    position, q_parts, k_parts, values, k_full, k_free, v_full, v_free, turn, False, WINDOW,
                    SCALE, BLOCK_N, STAGES, TURNS, GROUP, out_layout, layout,
                )  # fmt: skip
                if WINDOW > 0:
                    n_tile, weights, acc, top, total = attend_tiles(
                        first, gl.minimum(inner, last - 1), first, n_tile, weights, acc, top, total,
                        position, q_parts, k_parts, values, k_full, k_free, v_full, v_free, turn, True, WINDOW,
                        SCALE, BLOCK_N, STAGES, TURNS, GROUP, out_layout, layout,
                    )  # fmt: skip
            stage = n_tile % STAGES
            mbarrier.wait(v_full.index(stage), (n_tile // STAGES) & 1)
            if RANGE > 0:
                if last * BLOCK_N > length:
                    clear_values(values.index(stage), 0, length - (last - 1) * BLOCK_N, BLOCK_N, E)
            else:
                if WINDOW > 0:
                    if begin > first * BLOCK_N:
                        clear_values(values.index(stage), begin - first * BLOCK_N, length - first * BLOCK_N, BLOCK_N, E)
            product = hopper.warpgroup_mma(weights, values.index(stage), acc, is_async=True)
            _, next_row0, next_queries, next_length, next_skip = find_item(
                nth_item(n + 1), items, query_start_ptr, seq_len_ptr, S, K, BLOCK_Q
            )
            acc = hopper.warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(v_free.index(stage), count=1)
            n_tile += 1
            if RANGE > 0:
                acc, top, total = join(joined, joined_top, joined_total, acc, top, total, out_layout)
            if SINKS:
                known = m < BLOCK_Q * G
                sink = gl.load(sinks_ptr + head * G + m % G, mask=known, other=0.0).to(gl.float32)
                if RANGE > 0:
                    total += gl.exp2(gl.fma(sink, 1.4426950408889634, -top))
                else:
                    total += gl.exp2(sink * 1.4426950408889634 - top)
            write_rows(acc, total, out_ptr, row0, queries, skip, head, H, G, E, GROUP, out_layout)
        else:
            _, next_row0, next_queries, next_length, next_skip = find_item(
                nth_item(n + 1), items, query_start_ptr, seq_len_ptr, S, K, BLOCK_Q
            )
        row0 = next_row0
        queries = next_queries
        length = next_length
        skip = next_skip


@gluon.jit(do_not_specialize=["S", "items", "few"])
def hopper_flash_kernel(
    q_ptr, cache_ptr, out_ptr, table_ptr, query_start_ptr, seq_len_ptr, q_norm_ptr, cos_ptr, sin_ptr, sinks_ptr,
    S, items,
    few,  # query tokens of sequences that are left out
    Q_ROW: gl.constexpr, Q_HEAD: gl.constexpr, CACHE_BLOCK: gl.constexpr, CACHE_KV: gl.constexpr,
    CACHE_HEAD: gl.constexpr, CACHE_POS: gl.constexpr, TABLE_ROW: gl.constexpr,
    SCALE: gl.constexpr,  # of q.k, times log2(e)
    WINDOW: gl.constexpr, H: gl.constexpr, K: gl.constexpr, G: gl.constexpr, E: gl.constexpr, P: gl.constexpr,
    BLOCK_N: gl.constexpr,  # tokens of a tile
    RANGE: gl.constexpr,  # tokens of a range, or 0: rows depend on what else is in their tile
    STAGES: gl.constexpr,  # tiles in shared memory
    F: gl.constexpr, NORM: gl.constexpr, EPS: gl.constexpr, SINKS: gl.constexpr,
    TURNS: gl.constexpr,  # whether the groups take turns
):  # fmt: skip
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    ASCENDING: gl.constexpr = RANGE > 0
    TOKENS: gl.constexpr = P if P < BLOCK_N else BLOCK_N
    entries = tma.make_tensor_descriptor(cache_ptr, [2147483647, E], [CACHE_POS, 1], [TOKENS, 64], shared)
    queries = gl.allocate_shared_memory(dtype, [2, 64, E], shared)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, E], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, E], shared)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    hopper.fence_async_shared()
    mbarrier.arrive(turn.index(0), count=1)
    gl.warp_specialize(
        [
            (_attend, (
                queries, keys, values, k_full, k_free, v_full, v_free, turn, q_ptr, out_ptr, query_start_ptr,
                seq_len_ptr, q_norm_ptr, cos_ptr, sin_ptr, sinks_ptr, S, items, few, Q_ROW, Q_HEAD, SCALE, WINDOW, H, K,
                G, E, BLOCK_N, RANGE, STAGES, F, NORM, EPS, SINKS, TURNS, 0,
            )),
            (_attend, (
                queries, keys, values, k_full, k_free, v_full, v_free, turn, q_ptr, out_ptr, query_start_ptr,
                seq_len_ptr, q_norm_ptr, cos_ptr, sin_ptr, sinks_ptr, S, items, few, Q_ROW, Q_HEAD, SCALE, WINDOW, H, K,
                G, E, BLOCK_N, RANGE, STAGES, F, NORM, EPS, SINKS, TURNS, 1,
            )),
            (bring_tiles, (
                entries, keys, values, k_full, k_free, v_full, v_free, table_ptr, query_start_ptr, seq_len_ptr, S,
                items, few, CACHE_BLOCK, CACHE_KV, CACHE_HEAD, CACHE_POS, TABLE_ROW, WINDOW, K, G, E, P, BLOCK_N,
                STAGES, ASCENDING,
            )),
        ],
        [4, 1],  # warps of the second group and of what fills shared memory
        [232, 40],  # registers of their threads; the first group has as many as the second one
    )  # fmt: skip


hopper_flash = GluonKernel(
    hopper_flash_kernel,
    "(Tensor q, Tensor cache, Tensor(a!) out, Tensor table, Tensor query_start, Tensor seq_lens, Tensor q_norm,"
    " Tensor cos, Tensor sin, Tensor sinks, SymInt S, SymInt items, SymInt few) -> ()",
    warps=4,
)


_BLOCK_M = 128  # query rows of a work item


def flash_configs(site: CallSite) -> list[Config]:
    """Launch constants of the kernel: as many programs as the GPU has processors; one fits on each. Of heads of 256
    numbers two tiles of 64 tokens fit next to the queries, and the sums leave no registers for the scores of more."""
    block_n = 64 if site.args["q_THE"].shape[2] == 256 else 128
    return [
        {"programs": site.target.multiprocessors, "block_n": block_n, "stages": 2, "turns": turns}
        for turns in (True, False)
    ]


def is_flash(site: CallSite) -> bool:
    """Whether the kernel serves the site: a cache of 16 bits, scores as they are, causal, heads of 64, 128 or 256."""
    q, cache = site.args["q_THE"], site.args["kv_cache"]
    H, E = q.shape[1:]
    plain = site.args["softcap"] == 0 and site.args["kv_scales"] is None and site.args["ancestors_T"] is None
    norm, position = site.args["q_norm_E"], cache.stride(3)
    plain = plain and (norm is None or norm.is_contiguous())
    tiled = E in (64, 128, 256) and H // cache.shape[2] <= 32
    tiled = tiled and all(cache.stride(i) % position == 0 for i in (0, 1, 2))
    aligned = all(n % 8 == 0 for n in (q.stride(0), q.stride(1), q.storage_offset(), position))
    halves = cache.dtype == q.dtype and q.dtype in (torch.bfloat16, torch.float16)
    return runs_gluon(site.target) and halves and plain and tiled and aligned and is_mixed(site)


def in_flash_ranges(site: CallSite) -> bool:
    """Whether the kernel serves the prompts of a site with rows that do not depend on others. Sums of two ranges have
    room in registers up to 128 numbers a head; either all of them rotate or none."""
    E, cos = site.args["q_THE"].shape[2], site.args["cos_TF"]
    return in_ranges(site) and is_flash(site) and E <= 128 and (cos is None or 2 * cos.shape[1] == E)


def flash_range_configs(site: CallSite) -> list[Config]:
    """As many tiles as there is shared memory for, next to the queries, and as many programs as processors."""
    stages = 5 if site.args["q_THE"].shape[2] == 128 else 10
    return [
        {"programs": site.target.multiprocessors, "block_n": 64, "stages": stages, "length": RANGE, "turns": turns}
        for turns in (True, False)
    ]


def _launch_prompts(
    rows: Rows, paged: Paged, scores: Scores, rotary: Rotary | None, *,
    programs: int, block_n: int, stages: int, turns: bool, few: int = 1, length: int = 0,
) -> Tensor:  # fmt: skip
    """The output, in which rows of prompts are written. few: query tokens of sequences that are left out. length: of a
    range."""
    q_THE, k_TKE, v_TKE = rows
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    (T, H, E), (kv_cache, *where) = q_THE.shape, paged
    K, P, S = kv_cache.shape[2], kv_cache.shape[3], paged.seq_lens.shape[0]
    G = H // K
    (q_norm, _, cos, sin), rotation = rotary_arguments(rotary, q_THE)
    store_rows(k_TKE, v_TKE, paged, None, rotary)
    hopper_flash(
        programs, q_THE, kv_cache, out_THE, *where, q_norm, cos, sin,
        q_THE if scores.sinks_H is None else scores.sinks_H, S, (T // (_BLOCK_M // G) + S) * K, few,
        Q_ROW=q_THE.stride(0), Q_HEAD=q_THE.stride(1), CACHE_BLOCK=kv_cache.stride(0), CACHE_KV=kv_cache.stride(1),
        CACHE_HEAD=kv_cache.stride(2), CACHE_POS=kv_cache.stride(3), TABLE_ROW=paged.block_table.stride(0),
        SCALE=score_constants(scores.scale, 0.0)[0], WINDOW=scores.window, H=H, K=K, G=G, E=E, P=P, BLOCK_N=block_n,
        RANGE=length, STAGES=stages, SINKS=scores.sinks_H is not None, TURNS=turns, **rotation,
    )  # fmt: skip
    return out_THE


@paged_attention.impl("gluon_prefill", device="cuda", supports=is_flash, configs=flash_configs, remedy=problem)
def gluon_prefill(rows: Rows, paged: Paged, scores: Scores, rotary: Rotary | None, **config: Any) -> Tensor:
    """Any ragged batch."""
    few = plan_few(rows, paged, None)
    out_THE = _launch_prompts(rows, paged, scores, rotary, few=few.left_out, **config)
    launch_few(few, rows, paged, out_THE, scores, None, None, rotary)
    return out_THE


@paged_attention.impl(
    "gluon_ranges", device="cuda", supports=in_flash_ranges, configs=flash_range_configs, row_order=range_order,
    remedy=problem,
)  # fmt: skip
def gluon_ranges(rows: Rows, paged: Paged, scores: Scores, rotary: Rotary | None, **config: Any) -> Tensor:
    """Any ragged batch, each row as if it were the only one."""
    out_THE = _launch_prompts(rows, paged, scores, rotary, **config)
    launch_ranges(
        rows, paged, out_THE, scores, None, rotary, block_n=config["block_n"], length=config["length"],
        single=True, **SINGLE,
    )  # fmt: skip
    return out_THE
