"""Triton for adapters of experts: kernels for x @ A.T of pairs of a token and an expert, and what the experts' products
add for B in their ends, adapter by adapter."""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.moe.fused_moe.operands import ExpertLora

_MOST_RANKS = 64  # columns of B, or rows of A, that are multiplied at a time


@triton.jit
def _shrink_pairs_kernel(
    x_ptr, a_ptr, experts_ptr, ids_ptr, low_ptr, X_ROW: tl.constexpr, A: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, FIRST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair)
    own_id = tl.load(ids_ptr + pair // A)
    if (expert < 0) | (own_id <= 0):
        return
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + (pair // A if FIRST else pair).to(tl.int64) * X_ROW + k
    a = a_ptr + ((own_id * N + expert).to(tl.int64) * R + r)[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        row = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(a + start, mask=(r < R)[:, None] & inside[None, :], other=0.0).to(tl.float32) * row[None, :]
    tl.store(low_ptr + pair.to(tl.int64) * R + r, tl.sum(total, axis=1), mask=r < R)


@triton.jit
def _shrink_tiles_kernel(
    x_ptr, a_ptr, ids_ptr, order_ptr, tiles_ptr, low_ptr, X_ROW: tl.constexpr, A: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, TILES: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    if tl.program_id(0) >= tl.load(tiles_ptr + TILES * 3):
        return
    tile = tiles_ptr + tl.program_id(0) * 3
    expert = tl.load(tile)
    begin = tl.load(tile + 1)
    t = tl.arange(0, BLOCK_T)
    there = t < tl.load(tile + 2)
    pair = tl.load(order_ptr + begin + t, mask=there, other=0)
    ids = tl.load(ids_ptr + pair // A, mask=there, other=0)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + (pair // A if FIRST else begin + t).to(tl.int64)[:, None] * X_ROW + k[None, :]
    first = tl.maximum(tl.min(tl.where(ids > 0, ids, 1 << 30), axis=0), 1)
    for own_id in range(first, tl.max(ids, axis=0) + 1):
        own = ids == own_id
        if tl.max(own.to(tl.int32), axis=0) > 0:
            a = a_ptr + ((own_id * N + expert).to(tl.int64) * R + r)[None, :] * K + k[:, None]
            total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for start in range(0, K, BLOCK_K):
                inside = start + k < K
                rows = tl.load(x + start, mask=own[:, None] & inside[None, :], other=0.0)
                columns = tl.load(a + start, mask=inside[:, None] & (r < R)[None, :], other=0.0)
                if EMULATED:
                    rows, columns = rows.to(tl.float32), columns.to(tl.float32)
                total = tl.dot(rows, columns, total, input_precision="ieee")
            tl.store(low_ptr + pair.to(tl.int64)[:, None] * R + r[None, :], total, mask=own[:, None] & (r < R)[None, :])


@triton.jit
def plus_low_rank(
    acc, pair, ids_ptr, low_ptr, b_ptr, expert, row, in_row,
    A: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, LOW_ROW: tl.constexpr,
    BLOCK_R: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """acc [rows, pairs] and what adapters add to these rows of an expert's weights for each pair; where ``in_row`` does
    not hold, or ``pair`` is negative, nothing. low_ptr: of the matrix that the rows belong to, for each pair after
    LOW_ROW numbers."""
    ids = tl.load(ids_ptr + tl.maximum(pair, 0) // A, mask=pair >= 0, other=0)
    first = tl.maximum(tl.min(tl.where(ids > 0, ids, 1 << 30), axis=0), 1)
    for own_id in range(first, tl.max(ids, axis=0) + 1):
        own = ids == own_id
        if tl.max(own.to(tl.int32), axis=0) > 0:
            for start in tl.static_range(0, RANK, BLOCK_R):
                j = start + tl.arange(0, BLOCK_R)
                at = b_ptr + ((own_id * N + expert).to(tl.int64) * RANK + j)[None, :] * ROWS + row[:, None]
                b = tl.load(at, mask=in_row[:, None] & (j < RANK)[None, :], other=0.0)
                low = tl.load(
                    low_ptr + pair.to(tl.int64)[None, :] * LOW_ROW + j[:, None],
                    mask=own[None, :] & (j < RANK)[:, None], other=0.0,
                ).to(b.dtype)  # fmt: skip
                if EMULATED:
                    b, low = b.to(tl.float32), low.to(tl.float32)
                acc = tl.dot(b, low, acc, input_precision="ieee")
    return acc


def shrink_pairs(lora: ExpertLora, i: int, x: Tensor, experts_TA: Tensor, x_row: int) -> Tensor:
    """x @ A.T of the first or second product by programs of one pair and some rows of A."""
    low, (_, N, R, K) = _low(lora, i, experts_TA), lora.a[i].shape
    launch_triton(
        _shrink_pairs_kernel, (-(-R // 8), experts_TA.numel()), x, lora.a[i], experts_TA, lora.adapter_ids_T, low,
        X_ROW=x_row, A=experts_TA.shape[1], N=N, R=R, K=K, FIRST=i == 0, BLOCK_R=8,
        BLOCK_K=min(512, triton.next_power_of_2(K)), EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return low


def shrink_tiles(
    lora: ExpertLora, i: int, x: Tensor, experts_TA: Tensor, x_row: int, order: Tensor, tiles: Tensor,
    config: Mapping[str, int],
) -> Tensor:  # fmt: skip
    """x @ A.T by programs of a tile of pairs in the order of experts and some rows of A."""
    low, (_, N, R, K) = _low(lora, i, experts_TA), lora.a[i].shape
    block = min(_MOST_RANKS, max(16, triton.next_power_of_2(R)))
    launch_triton(
        _shrink_tiles_kernel, (config["tiles"], -(-R // block)), x, lora.a[i], lora.adapter_ids_T, order, tiles, low,
        X_ROW=x_row, A=experts_TA.shape[1], N=N, R=R, K=K, FIRST=i == 0, BLOCK_T=config["block_t"], BLOCK_R=block,
        BLOCK_K=64, TILES=config["tiles"], EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return low


def _low(lora: ExpertLora, i: int, experts_TA: Tensor) -> Tensor:
    """Memory for x @ A.T of a product's pairs."""
    return experts_TA.new_empty((experts_TA.numel(), lora.a[i].shape[2]), dtype=torch.float32)


def lora_constants(lora: ExpertLora | None) -> dict[str, int]:
    """Of a kernel with `plus_low_rank` in it."""
    rank = 0 if lora is None else lora.rank
    return {"RANK": rank, "BLOCK_R": min(_MOST_RANKS, max(16, triton.next_power_of_2(rank)))}
