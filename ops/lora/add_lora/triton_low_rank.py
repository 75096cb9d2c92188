"""Triton for the halves of add_lora: kernels for x @ A.T, and what a linear layer's own kernel adds for B in its end.

All are bound by the time that a launch and a read take, hardly by bytes: what a program needs is asked for at once,
the part of A before the kernel that makes x is done. A program of few rows has one row of x and one of A; more rows are
multiplied adapter by adapter, by tensor cores, in parts of the inner dimension; the last to arrive adds all.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.lora.add_lora.operands import LowRank

MOST_MATRICES = 3  # of a layer, which a linear layer's kernel tells apart
_ROW_BY_ROW = 3 << 22  # entries of A times rows up to which each row has programs of its own
_PROGRAMS = 128  # that a launch for more rows should have


@triton.jit
def _shrink_row_kernel(
    x_ptr, a_ptr, ids_ptr, norm_ptr, low_ptr, x_stride, R: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    own_id = tl.load(ids_ptr + t)
    k = tl.arange(0, BLOCK_K)
    width = tl.where(own_id > 0, K, 0)
    a_row = a_ptr + (own_id * R + r).to(tl.int64) * K + k
    a = tl.load(a_row, mask=k < width, other=0.0)
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        inside = start + k < K
        x = tl.load(x_ptr + t * x_stride + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        total += x * a.to(tl.float32)
        if start + BLOCK_K < K:
            a = tl.load(a_row + start + BLOCK_K, mask=start + BLOCK_K + k < width, other=0.0)
    low = tl.sum(total, axis=0)
    if NORM:
        low *= tl.rsqrt(tl.sum(squares, axis=0) / K + EPS)
    tl.store(low_ptr + t * R + r, low)


@triton.jit(do_not_specialize_on_alignment=["T"])
def _shrink_kernel(
    x_ptr, a_ptr, ids_ptr, low_ptr,
    partial_ptr,  # float32 [row blocks, adapters, rank blocks, SPLITS, ROWS, BR]
    arrived_ptr,  # [row blocks * adapters * rank blocks] int32, zero before and after
    T, x_stride, K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    RANK_BLOCKS: tl.constexpr, PER_SPLIT: tl.constexpr, SPLITS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    own_id = tl.program_id(1) + 1
    block = tl.program_id(2) % RANK_BLOCKS
    split = tl.program_id(2) // RANK_BLOCKS
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids = tl.load(ids_ptr + t, mask=t < T, other=-1)
    own = ids == own_id
    written = own | (ids == tl.where(own_id == 1, 0, own_id))  # zeros for rows without an adapter
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    if tl.max(written.to(tl.int32), axis=0) > 0:
        r = block * BR + tl.arange(0, BR)
        k = split * PER_SPLIT + tl.arange(0, BK)
        x = x_ptr + t.to(tl.int64)[:, None] * x_stride + k[None, :]
        a = a_ptr + (own_id * R + r).to(tl.int64)[None, :] * K + k[:, None]
        total = tl.zeros([ROWS, BR], tl.float32)
        for at in range(0, PER_SPLIT, BK):
            inside = (k + at < K) & (k + at < (split + 1) * PER_SPLIT)
            x_tile = tl.load(x + at, mask=own[:, None] & inside[None, :], other=0.0)
            a_tile = tl.load(a + at, mask=(r < R)[None, :] & inside[:, None], other=0.0)
            if EMULATED:
                x_tile, a_tile = x_tile.to(tl.float32), a_tile.to(tl.float32)
            total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
        to = low_ptr + t.to(tl.int64)[:, None] * R + r[None, :]
        stored = written[:, None] & (r < R)[None, :]
        if SPLITS == 1:
            tl.store(to, total, mask=stored)
        else:
            place = (tl.program_id(0) * tl.num_programs(1) + own_id - 1) * RANK_BLOCKS + block
            cell = (tl.arange(0, ROWS) * BR)[:, None] + tl.arange(0, BR)[None, :]
            parts = partial_ptr + place.to(tl.int64) * (SPLITS * ROWS * BR) + cell
            tl.store(parts + split * (ROWS * BR), total, mask=stored)
            tl.debug_barrier()
            before = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel")
            if before == SPLITS - 1:
                total = tl.zeros([ROWS, BR], tl.float32)
                for i in tl.static_range(SPLITS):
                    total += tl.load(parts + i * (ROWS * BR), mask=stored, other=0.0, cache_modifier=".cg")
                tl.store(arrived_ptr + place, 0)
                tl.store(to, total, mask=stored)


@triton.jit
def _part_of(row, END_0: tl.constexpr, END_1: tl.constexpr):
    """Which of the layer's matrices rows of the weights belong to."""
    return (row >= END_0).to(tl.int32) + (row >= END_1).to(tl.int32)


@triton.jit
def load_b(own_id, b_ptr, row, in_row, N: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """[rows, BLOCK_R] of B for the one token's rows. Zeros if it has no adapter, or if there are none (RANK 0). Nothing
    that runs in a step writes it: it may be asked for before the kernel that makes x is done."""
    if RANK:
        j = tl.arange(0, BLOCK_R)
        inside = (j < tl.where(own_id > 0, RANK, 0))[None, :] & in_row[:, None]
        return tl.load(b_ptr + (own_id.to(tl.int64) * RANK + j)[None, :] * N + row[:, None], mask=inside, other=0.0)
    else:
        return tl.zeros([1], tl.float32)


@triton.jit
def load_low(
    own_id, low_ptr, row, in_row, RANK: tl.constexpr, BLOCK_R: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr
):
    """[rows, BLOCK_R] of x @ A.T: the sums of its products with B are added to the one token's rows."""
    if RANK:
        j = tl.arange(0, BLOCK_R)
        inside = (j < tl.where(own_id > 0, RANK, 0))[None, :] & in_row[:, None]
        return tl.load(low_ptr + (_part_of(row, END_0, END_1) * RANK)[:, None] + j[None, :], mask=inside, other=0.0)
    else:
        return tl.zeros([1], tl.float32)


@triton.jit
def expanded_tile(
    ids, low_ptr, b_ptr, first, end, token,
    N: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] float32: what adapters add to the rows of the weights from ``first`` on, before ``end``, times
    tokens. The tables of all adapters are one matrix of COLUMNS columns, in which a token has numbers where its own
    adapter lies."""
    CHUNK: tl.constexpr = 64 if COLUMNS > 32 else 32 if COLUMNS > 16 else 16
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if COLUMNS <= 4 * CHUNK:  # all loads together
        for start in tl.static_range(0, COLUMNS, CHUNK):
            total = _add_columns(total, start, ids, low_ptr, b_ptr, first, end, token, N, RANK, COLUMNS, END_0, END_1,
                                 CHUNK, BLOCK_N, EMULATED)  # fmt: skip
    else:
        for start in range(0, COLUMNS, CHUNK):
            total = _add_columns(total, start, ids, low_ptr, b_ptr, first, end, token, N, RANK, COLUMNS, END_0, END_1,
                                 CHUNK, BLOCK_N, EMULATED)  # fmt: skip
    return total


@triton.jit
def _add_columns(
    total, start, ids, low_ptr, b_ptr, first, end, token,
    N: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 1 + (END_0 < N) + (END_1 < N)
    row = first + tl.arange(0, BLOCK_N)
    column = start + tl.arange(0, CHUNK)
    own = (ids[None, :] == 1 + (column // RANK)[:, None]) & (column < COLUMNS)[:, None]
    used = tl.max(own.to(tl.int32), axis=1) > 0  # columns of adapters that no token here has are not read
    at = b_ptr + (RANK + column).to(tl.int64)[None, :] * N + row[:, None]
    b = tl.load(at, mask=(row < end)[:, None] & used[None, :], other=0.0)
    at_low = low_ptr + token.to(tl.int64)[None, :] * (PARTS * RANK) + (column % RANK)[:, None]
    if END_0 % BLOCK_N == 0 and END_1 % BLOCK_N == 0:  # all rows are of one matrix
        low = tl.load(at_low + _part_of(first, END_0, END_1) * RANK, mask=own, other=0.0).to(b.dtype)
        total = _plus_product(b, low, total, EMULATED)
    else:
        part = _part_of(row, END_0, END_1)
        for p in tl.static_range(PARTS):
            low = tl.load(at_low + p * RANK, mask=own, other=0.0).to(b.dtype)
            total = _plus_product(tl.where((part == p)[:, None], b, 0.0), low, total, EMULATED)
    return total


@triton.jit
def _plus_product(b, low, total, EMULATED: tl.constexpr):
    if EMULATED:
        b, low = b.to(tl.float32), low.to(tl.float32)
    return tl.dot(b, low, total, input_precision="ieee")


class Adapters(NamedTuple):
    """What a linear layer's kernel takes of the adapters of its rows. low [T, R] float32: x @ A.T; b [L, r, O], ids [T]
    and widths as of `add_lora`."""

    low: Tensor
    b: Tensor
    ids: Tensor
    widths: list[int]

    @property
    def constants(self) -> dict[str, int]:
        """Of a kernel that adds them."""
        L, rank, _ = self.b.shape
        ends = [sum(self.widths[:i]) for i in (1, 2)]
        return {"RANK": rank, "COLUMNS": (L - 1) * rank, "END_0": ends[0], "END_1": ends[1]}


def low_rank_config(site: CallSite) -> dict[str, int]:
    """Launch constants of x @ A.T for an op that has adapters in it: rows of a program's tile, 0 for programs of one
    row each, and parts of the inner dimension."""
    a_LRI, T = site.args["a_LRI"], site.rows("x_TI")
    if a_LRI is None or T == 1 or T * a_LRI.shape[1] * a_LRI.shape[2] <= _ROW_BY_ROW:
        return {"low_rows": 0, "low_splits": 1}
    rows = min(64, max(16, triton.next_power_of_2(T)))
    return {"low_rows": rows, "low_splits": splits_for(T, rows, a_LRI)}


def splits_for(T: int, rows: int, a_LRI: Tensor) -> int:
    """Parts of the inner dimension with which a launch has enough programs, none of less than 256 entries."""
    programs = -(-T // rows) * (a_LRI.shape[0] - 1) * -(-a_LRI.shape[1] // 64)
    possible = [n for n in (1, 2, 4, 8, 16) if n == 1 or a_LRI.shape[2] // n >= 256]
    return next((n for n in possible if programs * n >= _PROGRAMS), possible[-1])


def shrunk(
    x_TI: Tensor, lora: LowRank | None, low_rows: int = 0, low_splits: int = 1, norm: tuple[Tensor, float] | None = None
) -> Adapters | None:
    """The first of the halves, if there are tables. low_rows, low_splits: of `low_rank_config`. norm: weight and eps
    of the norm of one row of x."""
    if lora is None:
        return None
    a_LRI, b_LrO, adapter_ids_T, widths = lora
    low_TR = torch.empty((x_TI.shape[0], a_LRI.shape[1]), dtype=torch.float32, device=x_TI.device)
    if low_rows:
        shrink_tiles(x_TI, a_LRI, adapter_ids_T, low_TR, low_rows, low_splits)
    else:
        shrink_rows(x_TI, a_LRI, adapter_ids_T, low_TR, *(norm or ()))
    return Adapters(low_TR, b_LrO, adapter_ids_T, widths)


def shrink_rows(
    x_TI: Tensor, a_LRI: Tensor, adapter_ids_T: Tensor, low_TR: Tensor, norm_I: Tensor | None = None, eps: float = 0.0
) -> None:
    """x @ A.T by programs of one row each."""
    (T, K), R = x_TI.shape, a_LRI.shape[1]
    launch_triton(
        _shrink_row_kernel, (R, T), x_TI, a_LRI, adapter_ids_T, x_TI if norm_I is None else norm_I, low_TR,
        x_TI.stride(0), R=R, K=K, EPS=eps, NORM=norm_I is not None, BLOCK_K=min(16384, triton.next_power_of_2(K)),
        EMULATED=triton.knobs.runtime.interpret, num_warps=8 if K > 2048 else 4,
    )  # fmt: skip


def shrink_tiles(x_TI: Tensor, a_LRI: Tensor, adapter_ids_T: Tensor, low_TR: Tensor, rows: int, splits: int) -> None:
    """x @ A.T by programs of ``rows`` rows and one adapter."""
    (T, K), (L, R, _) = x_TI.shape, a_LRI.shape
    few = min(64, max(16, triton.next_power_of_2(R)))
    blocks, row_blocks = -(-R // few), -(-T // rows)
    count = row_blocks * (L - 1) * blocks
    partial = (
        torch.empty(count * splits * rows * few, dtype=torch.float32, device=x_TI.device) if splits > 1 else low_TR
    )
    launch_triton(
        _shrink_kernel, (row_blocks, L - 1, splits * blocks), x_TI, a_LRI, adapter_ids_T, low_TR, partial,
        zeroed(x_TI, count) if splits > 1 else adapter_ids_T, T, x_TI.stride(0), K=K, R=R, ROWS=rows, BR=few,
        BK=128 if few * rows <= 2048 else 64, RANK_BLOCKS=blocks, PER_SPLIT=-(-K // splits), SPLITS=splits,
        EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
