"""Triton kernels of the scores of index_topk: keys go to the cache, then each token's scores to a scratch.

The scratch holds int32 numbers in the order of the scores, so that selecting compares integers. A program has some
rows of the step, maybe of several sequences, and every so many tiles of their keys. A tile stays while rows pass by it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.index_topk.operands import IndexRows, PagedKeys
from graphllm.ops.attention.latent_attention.triton_write import find_sequences
from graphllm.ops.attention.paged_attention.triton_common import multiply, power_of_2, tile_blocks, tile_slots

_WRITE_TOKENS = 16  # of a program


@triton.jit(do_not_specialize_on_alignment=["S"])
def _write_kernel(
    k_ptr, cache_ptr, table_ptr, query_start_ptr, seq_len_ptr, S,
    K_ROW: tl.constexpr, CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = find_sequences(query_start_ptr, t, S, BLOCK_S)
    owned = s < S  # rows beyond the last sequence are padding
    end = tl.load(query_start_ptr + 1 + s, mask=owned, other=0)
    position = tl.load(seq_len_ptr + s, mask=owned, other=0) - end + t
    block = tl.load(table_ptr + s.to(tl.int64) * TABLE_ROW + position // P, mask=owned, other=0).to(tl.int64)
    slot = block * CACHE_BLOCK + (position % P) * CACHE_POS
    e = tl.arange(0, E_PAD)
    inside = owned[:, None] & (e < E)[None, :]
    keys = tl.load(k_ptr + (t.to(tl.int64) * K_ROW)[:, None] + e[None, :], mask=inside)
    tl.store(cache_ptr + slot[:, None] + e[None, :], keys.to(cache_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sequence_of(query_start_ptr, row, S, BLOCK_S: tl.constexpr):
    """The sequence of a row."""
    s = 0
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        ends = tl.load(query_start_ptr + 1 + i, mask=i < S, other=2147483647)
        s += tl.sum((ends <= row).to(tl.int32))
    return s


@triton.jit
def _load_row(
    q_ptr, weights_ptr, row, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, W_ROW: tl.constexpr, H: tl.constexpr,
    H_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """Queries [H_PAD, E_PAD] and weights [H_PAD] of a row."""
    h, e = tl.arange(0, H_PAD), tl.arange(0, E_PAD)
    at = q_ptr + row.to(tl.int64) * Q_ROW + (h * Q_HEAD)[:, None] + e[None, :]
    q = tl.load(at, mask=(h < H)[:, None] & (e < E)[None, :], other=0.0)
    return q, tl.load(weights_ptr + row.to(tl.int64) * W_ROW + h, mask=h < H, other=0.0)


@triton.jit
def _store_scores(keys, q, weights, to_ptr, seen, EMULATED: tl.constexpr):
    """Scores of a tile of keys, as integers of the same order; -0.0 counts as 0.0."""
    products = multiply(keys, tl.trans(q), tl.zeros([keys.shape[0], q.shape[0]], tl.float32), EMULATED)
    scores = tl.sum(tl.maximum(products, 0.0) * weights[None, :], axis=1)
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    tl.store(to_ptr, bits ^ ((bits >> 31) & 0x7FFFFFFF), mask=seen)


@triton.jit(do_not_specialize_on_alignment=["S"])
def _score_kernel(
    q_ptr, weights_ptr, cache_ptr,
    order_ptr,  # int32 [rows of the chunk, WIDTH]
    table_ptr, query_start_ptr, seq_len_ptr, S,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, W_ROW: tl.constexpr, CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr,
    TABLE_ROW: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    P: tl.constexpr,
    FIRST: tl.constexpr,  # row of the step with which the chunk begins
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    row = FIRST + tl.program_id(0) * BLOCK_Q
    end_row = tl.minimum(row + BLOCK_Q, tl.load(query_start_ptr + S))
    s = sequence_of(query_start_ptr, row, S, BLOCK_S)
    n, e = tl.arange(0, BLOCK_N), tl.arange(0, E_PAD)
    while row < end_row:
        stop = tl.load(query_start_ptr + s + 1)
        last = tl.minimum(stop, end_row)
        if row < last:
            low = tl.load(seq_len_ptr + s) - stop + row  # position of the first row
            end = low + last - row  # one past that of the last one
            table_row = table_ptr + s.to(tl.int64) * TABLE_ROW
            share, shares = tl.program_id(1), tl.num_programs(1)  # programs divide the tiles of a row
            cache_block = tile_blocks(table_row, share, end, P, BLOCK_N)
            if BLOCK_Q == 1:
                q, weights = _load_row(q_ptr, weights_ptr, row, Q_ROW, Q_HEAD, W_ROW, H, H_PAD, E, E_PAD)
                to_ptr = order_ptr + (row - FIRST).to(tl.int64) * WIDTH
                for tile in range(share, (end + BLOCK_N - 1) // BLOCK_N, shares):
                    seen = tile * BLOCK_N + n < end
                    slots = tile_slots(cache_block, tile, CACHE_BLOCK, CACHE_POS, P, BLOCK_N)
                    inside = seen[:, None] & (e < E)[None, :]
                    keys = tl.load(cache_ptr + slots[:, None] + e[None, :], mask=inside, other=0.0)
                    cache_block = tile_blocks(table_row, tile + shares, end, P, BLOCK_N)
                    _store_scores(keys, q, weights, to_ptr + tile * BLOCK_N + n, seen, EMULATED)
            else:
                for tile in range(share, (end + BLOCK_N - 1) // BLOCK_N, shares):
                    at = tile * BLOCK_N + n
                    slots = tile_slots(cache_block, tile, CACHE_BLOCK, CACHE_POS, P, BLOCK_N)
                    inside = (at < end)[:, None] & (e < E)[None, :]
                    keys = tl.load(cache_ptr + slots[:, None] + e[None, :], mask=inside, other=0.0)
                    cache_block = tile_blocks(table_row, tile + shares, end, P, BLOCK_N)
                    for skip in range(tl.maximum(tile * BLOCK_N - low, 0), last - row):
                        r = row + skip
                        q, weights = _load_row(q_ptr, weights_ptr, r, Q_ROW, Q_HEAD, W_ROW, H, H_PAD, E, E_PAD)
                        to_ptr = order_ptr + (r - FIRST).to(tl.int64) * WIDTH + at
                        _store_scores(keys, q, weights, to_ptr, at <= low + skip, EMULATED)
            row = last
        s += 1


def write_keys(rows: IndexRows, paged: PagedKeys) -> None:
    """The step's keys go to the cache."""
    k_TE, (cache, table, *_) = rows.index_k_TE, paged
    (T, E), S = k_TE.shape, paged.seq_lens.shape[0]
    launch_triton(
        _write_kernel, ((T + _WRITE_TOKENS - 1) // _WRITE_TOKENS,), k_TE, *paged, S,
        K_ROW=k_TE.stride(0), CACHE_BLOCK=cache.stride(0), CACHE_POS=cache.stride(1), TABLE_ROW=table.stride(0), E=E,
        E_PAD=power_of_2(E), P=cache.shape[1], BLOCK_T=_WRITE_TOKENS, BLOCK_S=128, num_warps=4,
        EMULATED=triton.knobs.runtime.interpret,
    )  # fmt: skip


def write_scores(
    rows: IndexRows, paged: PagedKeys, order: Tensor, first: int, blocks: Any, *, block_q: int, block_n: int,
    shares: int, programs: int, warps: int, stages: int,
) -> None:  # fmt: skip
    """Scores of the rows from ``first`` on go to ``order``, [rows, width] int32.

    blocks: of block_q rows, of as many rows as ``order`` has at most.
    shares: programs among which the tiles of block_n keys of a row are divided, at least.
    programs: as many as all rows have where they are few.
    """
    q, _, weights = rows
    (_, H, E), (cache, table, *_), width = q.shape, paged, order.shape[1]
    shares = torch.sym_max(shares, torch.sym_min(-(-width // block_n), programs // torch.sym_max(1, blocks)))
    launch_triton(
        _score_kernel, (blocks, shares), q, weights, cache, order, *paged[1:], paged.seq_lens.shape[0],
        Q_ROW=q.stride(0), Q_HEAD=q.stride(1), W_ROW=weights.stride(0), CACHE_BLOCK=cache.stride(0),
        CACHE_POS=cache.stride(1), TABLE_ROW=table.stride(0), H=H, H_PAD=power_of_2(H), E=E, E_PAD=power_of_2(E),
        P=cache.shape[1], FIRST=first, WIDTH=width, BLOCK_Q=block_q, BLOCK_N=block_n, BLOCK_S=128,
        EMULATED=triton.knobs.runtime.interpret, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def scratch(rows: int | torch.SymInt, width: int, like: Tensor) -> Tensor:
    """For the scores of so many rows."""
    return like.new_empty((rows, width), dtype=torch.int32)
