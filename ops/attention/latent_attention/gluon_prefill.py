"""Steps with prompts on Hopper, see `prompts`: attention to a chunk of keys and values by a warp-specialized kernel.
`triton_prefill` has the same one for all other GPUs and cases.

Warps, barriers and what they do for a tile are those of `gluon_flash`. Keys have two parts: one of each head, and the
rotated one that all heads share. A program takes work items one after another, each a block of query tokens of one
sequence for one head. Some heads come before all others, so that their keys and values stay in the L2 cache.
"""

# mypy: allow-untyped-defs
# ruff: noqa: RUF059  (Gluon unpacks all or nothing)

from __future__ import annotations

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
from graphllm.ops.attention.latent_attention.prompts import attend, is_mixed, step_constants
from graphllm.ops.attention.latent_attention.triton_common import problem
from graphllm.ops.attention.latent_attention.triton_expand import MOST_TILE, Chunk
from graphllm.ops.attention.paged_attention.gluon_flash import (
    attend_tiles,
    find_item,
    first_scores,
    load_tile,
    nth_item,
    softmax,
    store_queries,
    write_rows,
)
from graphllm.ops.attention.paged_attention.gluon_flash_ranges import join
from graphllm.ops.attention.paged_attention.triton_common import score_constants

_BLOCK_Q = gl.constexpr(128)  # query tokens of a work item


@gluon.jit
def _find_work(
    item, items, begins_ptr, query_start_ptr, seq_len_ptr, S, start,
    CHUNK: gl.constexpr, H: gl.constexpr, TOGETHER: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What an item is: its head; its sequence's first row and query tokens, and those before the item; the chunk's row
    with the sequence's first key; the place of the item's first query among the keys from there on; how many keys there
    are; tiles of keys, none where nothing is to be done; whether the sequence has keys in earlier and in later chunks.
    """
    of_group = items // H * TOGETHER
    within = item % of_group
    s, row0, queries, length, skip = find_item(within, of_group, query_start_ptr, seq_len_ptr, S, TOGETHER, _BLOCK_Q)
    head = item // of_group * TOGETHER + within % TOGETHER
    begin = gl.load(begins_ptr + s)
    end = gl.load(begins_ptr + s + 1)
    first = gl.maximum(begin, start)
    keys = gl.minimum(end, start + CHUNK) - first
    low = length - queries + skip + begin - first
    last = gl.minimum(low + gl.minimum(queries - skip, _BLOCK_Q), keys)
    exists = (item < items) & (skip < queries) & (end > begin) & (last > 0)
    tiles = gl.where(exists, (last + BLOCK_N - 1) // BLOCK_N, 0)
    return head, row0, queries, skip, first - start, low, keys, tiles, begin < start, end > start + CHUNK


@gluon.jit
def _bring_tiles(
    nope, rotated, all_values, k_nope, k_rope, values, k_full, k_free, v_full, v_free, begins_ptr, query_start_ptr,
    seq_len_ptr, S, items, rounds, start,
    CHUNK: gl.constexpr, H: gl.constexpr, TOGETHER: gl.constexpr, N: gl.constexpr, R: gl.constexpr, V: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room, from an item's last tile to its
    first."""
    n_tile = 0
    for n in range(rounds):
        head, row0, queries, skip, at, low, keys, tiles, earlier, later = _find_work(
            nth_item(n), items, begins_ptr, query_start_ptr, seq_len_ptr, S, start, CHUNK, H, TOGETHER, BLOCK_N
        )
        for i in range(tiles):
            row = at + (tiles - 1 - i) * BLOCK_N
            stage = n_tile % STAGES
            lap = (n_tile // STAGES) & 1
            mbarrier.wait(k_free.index(stage), lap ^ 1)
            arrived = k_full.index(stage)
            mbarrier.expect(arrived, BLOCK_N * (N + R) * 2)
            for column in gl.static_range(0, N, 64):
                load_tile(nope, [row, head * N + column], arrived, k_nope.index(stage).slice(column, 64, dim=1))
            load_tile(rotated, [row, 0], arrived, k_rope.index(stage))
            mbarrier.wait(v_free.index(stage), lap ^ 1)
            arrived = v_full.index(stage)
            mbarrier.expect(arrived, BLOCK_N * V * 2)
            for column in gl.static_range(0, V, 64):
                load_tile(all_values, [row, head * V + column], arrived, values.index(stage).slice(column, 64, dim=1))
            n_tile += 1


@gluon.jit
def _attend(
    all_q_nope, all_q_rope, k_nope, k_rope, values, k_full, k_free, v_full, v_free, turn, q_nope_ptr, q_rope_ptr,
    begins_ptr, out_ptr, lse_ptr, query_start_ptr, seq_len_ptr, S, items, rounds, start,
    NOPE_ROW: gl.constexpr, NOPE_HEAD: gl.constexpr, ROPE_ROW: gl.constexpr, ROPE_HEAD: gl.constexpr,
    SCALE: gl.constexpr, CHUNK: gl.constexpr, H: gl.constexpr, TOGETHER: gl.constexpr, N: gl.constexpr,
    R: gl.constexpr, V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: attention for 64 of the rows of each item, tiles from the last to the first."""
    dtype: gl.constexpr = values.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    nope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [512 // N, N // 16], [4, 1], [1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [512 // R, R // 16], [4, 1], [1, 0])
    q_nope = all_q_nope.index(GROUP)
    q_rope = all_q_rope.index(GROUP)
    q_parts = (q_nope, q_rope)
    k_parts = (k_nope, k_rope)
    n_tile = 0
    work = _find_work(
        nth_item(0), items, begins_ptr, query_start_ptr, seq_len_ptr, S, start, CHUNK, H, TOGETHER, BLOCK_N
    )
    for n in range(rounds):
        head, row0, queries, skip, at, low, keys, tiles, earlier, later = work
        if tiles > 0:
            m = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, nope_layout))
            row = (row0 + skip + m).to(gl.int64)
            store_queries(
                q_nope, q_nope_ptr, q_nope_ptr, q_nope_ptr, q_nope_ptr, row, head, skip + m < queries, NOPE_ROW,
                NOPE_HEAD, N, 0, False, 0.0, nope_layout,
            )  # fmt: skip
            m = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, rope_layout))
            row = (row0 + skip + m).to(gl.int64)
            store_queries(
                q_rope, q_rope_ptr, q_rope_ptr, q_rope_ptr, q_rope_ptr, row, head, skip + m < queries, ROPE_ROW,
                ROPE_HEAD, R, 0, False, 0.0, rope_layout,
            )  # fmt: skip
            m = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
            position = gl.minimum(low + m, keys - 1)  # of the last key that a row sees
            top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, layout))
            total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, layout))
            acc = gl.zeros([64, V], gl.float32, layout=out_layout)
            scores = first_scores(q_parts, k_parts, k_full, k_free, turn, n_tile, BLOCK_N, STAGES, TURNS, GROUP, layout)
            new, top, total, rescale = softmax(
                scores, top, total, position, tiles - 1, True, 0, SCALE, BLOCK_N, False, layout
            )
            weights = gl.convert_layout(new.to(dtype), weights_layout)
            mbarrier.wait(k_full.index((n_tile + 1) % STAGES), ((n_tile + 1) // STAGES) & 1, pred=tiles > 1)
            full = gl.minimum(gl.maximum(gl.minimum(low + 1, keys), 0) // BLOCK_N, tiles - 1)  # seen by all rows
            n_tile, weights, acc, top, total = attend_tiles(
                full, tiles - 1, 0, n_tile, weights, acc, top, total, position, q_parts, k_parts, values, k_full,
                k_free, v_full, v_free, turn, True, 0, SCALE, BLOCK_N, STAGES, TURNS, GROUP, out_layout, layout,
            )  # fmt: skip
            n_tile, weights, acc, top, total = attend_tiles(
                0, full, 0, n_tile, weights, acc, top, total, position, q_parts, k_parts, values, k_full, k_free,
                v_full, v_free, turn, False, 0, SCALE, BLOCK_N, STAGES, TURNS, GROUP, out_layout, layout,
            )  # fmt: skip
            stage = n_tile % STAGES
            mbarrier.wait(v_full.index(stage), (n_tile // STAGES) & 1)
            product = hopper.warpgroup_mma(weights, values.index(stage), acc, is_async=True)
            work = _find_work(
                nth_item(n + 1), items, begins_ptr, query_start_ptr, seq_len_ptr, S, start, CHUNK, H, TOGETHER, BLOCK_N
            )
            acc = hopper.warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(v_free.index(stage), count=1)
            n_tile += 1
            lse = lse_ptr + (row0 + skip + m).to(gl.int64) * H + head
            if earlier:
                o = skip + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
                v = gl.arange(0, V, layout=gl.SliceLayout(0, out_layout))
                out = out_ptr + (((row0 + o).to(gl.int64) * H + head) * V)[:, None] + v[None, :]
                before = gl.load(out, mask=(o < queries)[:, None], other=0.0).to(gl.float32)
                top_before = gl.load(lse, mask=skip + m < queries, other=0.0)
                acc, top, total = join(before, top_before, gl.full_like(total, 1.0), acc, top, total, out_layout)
            if later:
                gl.store(lse, top + gl.log2(total), mask=skip + m < queries)
            write_rows(acc, total, out_ptr, row0, queries, skip, head, H, 1, V, GROUP, out_layout)
        else:
            work = _find_work(
                nth_item(n + 1), items, begins_ptr, query_start_ptr, seq_len_ptr, S, start, CHUNK, H, TOGETHER, BLOCK_N
            )


@gluon.jit(do_not_specialize=["S", "items", "start"])
def hopper_latent_flash_kernel(
    q_nope_ptr, q_rope_ptr, keys_ptr, k_rope_ptr, values_ptr, begins_ptr, out_ptr, lse_ptr, query_start_ptr,
    seq_len_ptr, S, items, start,
    NOPE_ROW: gl.constexpr, NOPE_HEAD: gl.constexpr, ROPE_ROW: gl.constexpr, ROPE_HEAD: gl.constexpr,
    SCALE: gl.constexpr,  # of q.k, times log2(e)
    CHUNK: gl.constexpr,  # rows of a chunk
    ROWS: gl.constexpr,  # of keys and values in memory
    H: gl.constexpr,
    TOGETHER: gl.constexpr,  # heads whose items come before those of others
    N: gl.constexpr, R: gl.constexpr, V: gl.constexpr,
    BLOCK_N: gl.constexpr,  # tokens of a tile
    STAGES: gl.constexpr,  # tiles in shared memory
    TURNS: gl.constexpr,  # whether the groups take turns
):  # fmt: skip
    dtype: gl.constexpr = keys_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    rounds = (items + gl.num_programs(0) - 1) // gl.num_programs(0)
    rounds = gl.where(gl.load(begins_ptr + S) > start, rounds, 0)  # a chunk without rows needs none
    nope = tma.make_tensor_descriptor(keys_ptr, [ROWS, H * N], [H * N, 1], [BLOCK_N, 64], shared)
    rotated = tma.make_tensor_descriptor(k_rope_ptr, [ROWS, R], [R, 1], [BLOCK_N, 64], shared)
    all_values = tma.make_tensor_descriptor(values_ptr, [ROWS, H * V], [H * V, 1], [BLOCK_N, 64], shared)
    q_nope = gl.allocate_shared_memory(dtype, [2, 64, N], shared)
    q_rope = gl.allocate_shared_memory(dtype, [2, 64, R], shared)
    k_nope = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, N], shared)
    k_rope = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, R], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, V], shared)
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
                q_nope, q_rope, k_nope, k_rope, values, k_full, k_free, v_full, v_free, turn, q_nope_ptr, q_rope_ptr,
                begins_ptr, out_ptr, lse_ptr, query_start_ptr, seq_len_ptr, S, items, rounds, start, NOPE_ROW,
                NOPE_HEAD, ROPE_ROW, ROPE_HEAD, SCALE, CHUNK, H, TOGETHER, N, R, V, BLOCK_N, STAGES, TURNS, 0,
            )),
            (_attend, (
                q_nope, q_rope, k_nope, k_rope, values, k_full, k_free, v_full, v_free, turn, q_nope_ptr, q_rope_ptr,
                begins_ptr, out_ptr, lse_ptr, query_start_ptr, seq_len_ptr, S, items, rounds, start, NOPE_ROW,
                NOPE_HEAD, ROPE_ROW, ROPE_HEAD, SCALE, CHUNK, H, TOGETHER, N, R, V, BLOCK_N, STAGES, TURNS, 1,
            )),
            (_bring_tiles, (
                nope, rotated, all_values, k_nope, k_rope, values, k_full, k_free, v_full, v_free, begins_ptr,
                query_start_ptr, seq_len_ptr, S, items, rounds, start, CHUNK, H, TOGETHER, N, R, V, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],  # warps of the second group and of what fills shared memory
        [232, 40],  # registers of their threads; the first group has as many as the second one
    )  # fmt: skip


hopper_latent_flash = GluonKernel(
    hopper_latent_flash_kernel,
    "(Tensor q_nope, Tensor q_rope, Tensor keys, Tensor k_rope, Tensor values, Tensor begins, Tensor(a!) out,"
    " Tensor(b!) lse, Tensor query_start, Tensor seq_lens, SymInt S, SymInt items, SymInt start) -> ()",
    warps=4,
)


def _flash(
    rows: LatentRows, of: Chunk, paged: PagedLatents, out_THV: Tensor, lse_TH: Tensor, scale: float, start: int, *,
    chunk: int, processors: int, together: int, block_n: int, flash_stages: int, turns: bool,
) -> None:  # fmt: skip
    """As the one of `triton_prefill`."""
    q_nope, q_rope = rows[:2]
    (T, H, N), R, V, S = q_nope.shape, q_rope.shape[2], out_THV.shape[2], paged.seq_lens.shape[0]
    hopper_latent_flash(
        processors, q_nope, q_rope, *of, out_THV, lse_TH, *paged[2:], S, (T // _BLOCK_Q.value + S) * H, start,
        NOPE_ROW=q_nope.stride(0), NOPE_HEAD=q_nope.stride(1), ROPE_ROW=q_rope.stride(0), ROPE_HEAD=q_rope.stride(1),
        SCALE=score_constants(scale, 0.0)[0], CHUNK=chunk, ROWS=chunk + MOST_TILE, H=H, TOGETHER=together, N=N, R=R,
        V=V, BLOCK_N=block_n, STAGES=flash_stages, TURNS=turns,
    )  # fmt: skip


def _is_flash(site: CallSite) -> bool:
    """Whether the kernel serves the site: 16 bits, heads of 128 numbers and 64 rotated ones."""
    rows = site.struct(LatentRows)
    (N, R, V), q = (*(x.shape[2] for x in rows[:2]), site.args["v_up_HVL"].shape[1]), rows[:2]
    aligned = all(n % 8 == 0 for x in q for n in (x.stride(0), x.stride(1), x.storage_offset()))
    halves = q[0].dtype in (torch.bfloat16, torch.float16)
    return runs_gluon(site.target) and halves and (N, R, V) == (128, 64, 128) and aligned and is_mixed(site)


def _flash_configs(site: CallSite) -> list[dict[str, Any]]:
    """Launch constants of the kernel: as many programs as the GPU has processors; one fits on each. Few heads together
    suit long prompts, many suit short ones."""
    H, processors = site.args["q_nope_THN"].shape[1], site.target.multiprocessors
    own = {"processors": processors, "block_n": 128, "flash_stages": 2, "turns": True}
    heads = sorted({max(n for n in range(1, most + 1) if H % n == 0) for most in (8, 16)})
    return [{**step_constants(site), **own, "together": together} for together in heads]


@latent_attention.impl("gluon_prefill", device="cuda", supports=_is_flash, configs=_flash_configs, remedy=problem)
def gluon_prefill(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, scale: float, ancestors_T: Tensor | None, **config: Any
) -> Tensor:
    """Any ragged batch."""
    return attend(rows, up, paged, scale, ancestors_T, _flash, **config)
