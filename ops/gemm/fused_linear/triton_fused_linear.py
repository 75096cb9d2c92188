"""Triton kernels for fused_linear with few rows: the weights stream through once, at the speed of memory.

`row_kernel` serves one row of x: each program loads whole rows of the weights into registers, before it even waits for
the kernel that makes x. `tile_kernel` serves up to some hundred rows with tensor cores: the weights are the left
operand, so that few tokens waste little of it; a long inner dimension is split among programs; the last to arrive adds
the parts, always in the same order.

Kernels start while their predecessor still runs (programmatic dependent launch): what they read before `gdc_wait` is
constant.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, exchange, launch_triton, zeroed
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.collectives.all_reduce.triton_exchange import exchange_half, one_trip, sum_over_ranks
from graphllm.ops.encodings.encoded_weights import BITS, span_of
from graphllm.ops.gemm.fused_linear.launch_constants import Config, beside_rows, read_by_tma, row_configs, sum_order
from graphllm.ops.gemm.fused_linear.op import MOST_ROWS, fused_linear
from graphllm.ops.gemm.fused_linear.triton_direct import direct_product
from graphllm.ops.gemm.fused_linear.triton_encoded import encoded_product, numbers_of, scales_at, tiles_of
from graphllm.ops.gemm.linear.operands import Matrix, Norm
from graphllm.ops.lora.add_lora.operands import LowRank
from graphllm.ops.lora.add_lora.triton_low_rank import (
    MOST_MATRICES,
    Adapters,
    expanded_tile,
    load_b,
    load_low,
    shrunk,
)


@triton.jit
def weight_rows(block, N: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of the weights that a tile holds: with a gate, rows of the gate and value halves in turn."""
    r = tl.arange(0, BLOCK_N)
    if GATED:
        column = block * (BLOCK_N // 2) + r // 2
        return column + (r % 2) * (N // 2), column < N // 2
    else:
        return block * BLOCK_N + r, block * BLOCK_N + r < N


@triton.jit
def _gate(acc):
    """silu(gate) * value."""
    gate, value = acc
    return gate / (1.0 + tl.exp(-gate)) * value


@triton.jit
def row_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr,
    low_ptr,  # what adapters add, if RANK is not 0: their x @ A.T, B, and which adapter each token has
    b_ptr, ids_ptr, WEIGHT_ROW: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    END_0: tl.constexpr, END_1: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    row, in_row = weight_rows(block, N, GATED, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * WEIGHT_ROW
    weight = tl.load(weight_row + k[None, :], mask=in_row[:, None] & (k < K)[None, :], other=0.0)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=in_row, other=0.0).to(tl.float32)
    own_id = 0
    if RANK:
        own_id = tl.load(ids_ptr)
    table = load_b(own_id, b_ptr, row, in_row, N, RANK, BLOCK_R)
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    low = load_low(own_id, low_ptr, row, in_row, RANK, BLOCK_R, END_0, END_1)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        inside = start + k < K
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
        if start + BLOCK_K < K:
            more = start + BLOCK_K + k
            weight = tl.load(weight_row + more[None, :], mask=in_row[:, None] & (more < K)[None, :], other=0.0)
    out = tl.sum(acc, axis=1)
    if NORM:
        out *= tl.rsqrt(tl.sum(squares, axis=0) / K + EPS)
    if RANK:
        bias += tl.sum(low * table.to(tl.float32), axis=1)
    _finish_row(out + bias, block, row, in_row, residual_ptr, out_ptr, N, RESIDUAL, GATED, BLOCK_N)


@triton.jit
def _finish_row(
    out, block, row, in_row, residual_ptr, out_ptr,
    N: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    column = row
    if GATED:
        out = _gate(tl.split(tl.reshape(out, [BLOCK_N // 2, 2])))
        column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside_out = column < N // 2
    else:
        inside_out = in_row
    if RESIDUAL:
        out += tl.load(residual_ptr + column, mask=inside_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=inside_out)


@triton.jit
def encoded_row_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, low_ptr, b_ptr, ids_ptr,
    WEIGHT_ROW: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, FORM: tl.constexpr, SPAN: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """`row_kernel` for weights with one scale a row."""
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    row, in_row = weight_rows(block, N, GATED, BLOCK_N)
    CODES: tl.constexpr = 4 if FORM == "int4" or FORM == "e2m1" else 2
    WIDTH: tl.constexpr = SPAN // CODES
    BLOCK_W: tl.constexpr = BLOCK_K // CODES
    dtype: tl.constexpr = tl.float32 if EMULATED else x_ptr.dtype.element_ty
    w = tl.arange(0, BLOCK_W)
    k = w // WIDTH * SPAN + w % WIDTH
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * WEIGHT_ROW
    words = tl.load(weight_row + w[None, :], mask=in_row[:, None] & (w < WEIGHT_ROW)[None, :], other=0)
    scale = scales_at(scales_ptr + row, in_row)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=in_row, other=0.0).to(tl.float32)
    own_id = 0
    if RANK:
        own_id = tl.load(ids_ptr)
    table = load_b(own_id, b_ptr, row, in_row, N, RANK, BLOCK_R)
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    low = load_low(own_id, low_ptr, row, in_row, RANK, BLOCK_R, END_0, END_1)
    acc = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    squares = tl.zeros([BLOCK_W], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        numbers = numbers_of(words, dtype, FORM, EMULATED)
        for j in tl.static_range(CODES):
            at = start + j * WIDTH + k
            x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
            if NORM:
                squares += x * x
                x *= tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32)
            acc += numbers[j].to(tl.float32) * x[None, :]
        if start + BLOCK_K < K:
            more = (start + BLOCK_K) // CODES + w
            words = tl.load(weight_row + more[None, :], mask=in_row[:, None] & (more < WEIGHT_ROW)[None, :], other=0)
    out = tl.sum(acc, axis=1) * scale
    if NORM:
        out *= tl.rsqrt(tl.sum(squares, axis=0) / K + EPS)
    if RANK:
        bias += tl.sum(low * table.to(tl.float32), axis=1)
    _finish_row(out + bias, block, row, in_row, residual_ptr, out_ptr, N, RESIDUAL, GATED, BLOCK_N)


@triton.jit
def _finish_tile(
    acc, block, token, T, bias_ptr, residual_ptr, out_ptr,
    N: tl.constexpr, RESIDUAL_ROW: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    if BIAS:
        row, in_row = weight_rows(block, N, GATED, BLOCK_N)
        acc += tl.load(bias_ptr + row, mask=in_row, other=0.0).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(acc, [BLOCK_N // 2, 2, BLOCK_T]), (0, 2, 1))
        acc = _gate(tl.split(pairs))
        column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        width = N // 2
    else:
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        width = N
    out = tl.trans(acc)
    inside = (token < T)[:, None] & (column < width)[None, :]
    token64 = token.to(tl.int64)[:, None]
    if RESIDUAL:
        at = residual_ptr + token64 * RESIDUAL_ROW + column[None, :]
        out += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token64 * width + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish_splits(
    acc, block, split, tile_t, token, T, bias_ptr, residual_ptr, out_ptr, partial_ptr, arrived_ptr,
    N: tl.constexpr, RESIDUAL_ROW: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write a tile once the parts of its sum are there: the last program to arrive adds them, always in one order."""
    if SPLITS == 1:
        _finish_tile(acc, block, token, T, bias_ptr, residual_ptr, out_ptr,
                     N, RESIDUAL_ROW, BIAS, RESIDUAL, GATED, BLOCK_N, BLOCK_T)  # fmt: skip
    else:
        tile = tile_t * tl.num_programs(0) + block
        SIZE: tl.constexpr = BLOCK_N * BLOCK_T
        cell = (tl.arange(0, BLOCK_N) * BLOCK_T)[:, None] + tl.arange(0, BLOCK_T)[None, :]
        parts = partial_ptr + tile.to(tl.int64) * (SPLITS * SIZE) + cell
        tl.store(parts + split * SIZE, acc)
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
        if before == SPLITS - 1:
            acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for i in tl.static_range(SPLITS):
                acc += tl.load(parts + i * SIZE, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
            _finish_tile(acc, block, token, T, bias_ptr, residual_ptr, out_ptr,
                         N, RESIDUAL_ROW, BIAS, RESIDUAL, GATED, BLOCK_N, BLOCK_T)  # fmt: skip


@triton.jit
def _expanded(
    ids, low_ptr, b_ptr, block, token,
    N: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr,
    GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """What adapters add to a tile; with a gate, to the rows of both halves apart, as B is read in neighbouring rows."""
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        gate = expanded_tile(ids, low_ptr, b_ptr, block * HALF, N // 2, token, N, RANK, COLUMNS, END_0, END_1, HALF,
                             BLOCK_T, EMULATED)  # fmt: skip
        value = expanded_tile(ids, low_ptr, b_ptr, N // 2 + block * HALF, N, token, N, RANK, COLUMNS, END_0, END_1,
                              HALF, BLOCK_T, EMULATED)  # fmt: skip
        return tl.reshape(tl.permute(tl.join(gate, value), (0, 2, 1)), [BLOCK_N, BLOCK_T])
    else:
        return expanded_tile(ids, low_ptr, b_ptr, block * BLOCK_N, N, token, N, RANK, COLUMNS, END_0, END_1, BLOCK_N,
                             BLOCK_T, EMULATED)  # fmt: skip


@triton.jit
def fetch_ahead(weight_ptr, weight_row, in_row, first, WEIGHT_ROW: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for AHEAD bytes of every weight row, from a number on, to be in the L2 cache soon."""
    NUMBER: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    first = tl.minimum(first, WEIGHT_ROW - AHEAD // NUMBER)  # never beyond the row's end
    line = (
        tl.where(in_row[:, None], weight_row, weight_ptr)
        + (first + tl.arange(0, AHEAD // 128) * (128 // NUMBER))[None, :]
    )
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["T"])
def tile_kernel(
    x_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr,
    partial_ptr,  # float32: [SPLITS, T, N] if PARTS, else [token tiles, blocks, SPLITS, BLOCK_N, BLOCK_T]
    arrived_ptr,  # [token tiles * blocks] int32, zero before and after
    low_ptr, b_ptr, ids_ptr, T, X_ROW: tl.constexpr, WEIGHT_ROW: tl.constexpr, RESIDUAL_ROW: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr,  # normalize x, which has one row
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    END_0: tl.constexpr, END_1: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    PARTS: tl.constexpr,  # leave the parts of the sums to a kernel that follows
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,  # of encoded weights
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,  # bytes of every weight row that are fetched to the L2 cache before x is there
    DIRECT: tl.constexpr,  # of a program that reads weights into registers: steps under way; or 0
    WARPS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    split = tl.program_id(1)
    tile_t = tl.program_id(2)
    row, in_row = weight_rows(block, N, GATED, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    TILES: tl.constexpr = tiles_of(K, BLOCK_K, SPAN)
    PER_SPLIT: tl.constexpr = (TILES + SPLITS - 1) // SPLITS
    EVEN: tl.constexpr = (N % BLOCK_N == 0) and (K % (BLOCK_K if FORM == "" else SPAN) == 0)
    CODES: tl.constexpr = 4 if FORM == "int4" or FORM == "e2m1" else 1 if FORM == "" else 2
    lo = split * PER_SPLIT
    hi = tl.minimum(lo + PER_SPLIT, TILES)
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * WEIGHT_ROW
    token = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    ids = token
    if RANK:
        ids = tl.load(ids_ptr + token, mask=token < T, other=0)
    if not EMULATED and DIRECT == 0:
        if AHEAD > 0:
            fetch_ahead(weight_ptr, weight_row, in_row, lo * (BLOCK_K // CODES), WEIGHT_ROW, AHEAD)
        tl.extra.cuda.gdc_wait()
    x_row = x_ptr + token.to(tl.int64)[:, None] * X_ROW
    if DIRECT:
        acc = direct_product(
            weight_ptr, row.to(tl.int64), in_row, scales_ptr + row, zeros_ptr + row, x_ptr, token.to(tl.int64),
            token < T, norm_ptr, X_ROW, WEIGHT_ROW, N, K, FORM, GROUP, ZEROS, NORM, BLOCK_N, BLOCK_T, BLOCK_K, WARPS,
            DIRECT, True, EMULATED,
        )  # fmt: skip
        if NORM:
            ALL: tl.constexpr = triton.next_power_of_2(K)
            every = tl.arange(0, ALL)
            x_row_0 = tl.load(x_ptr + every, mask=every < K, other=0.0).to(tl.float32)
            acc *= tl.rsqrt(tl.sum(x_row_0 * x_row_0, axis=0) / K + EPS)
    elif FORM != "":
        acc = encoded_product(
            weight_row, scales_ptr + row, zeros_ptr + row, in_row, x_row, token < T, lo, hi,
            N, K, FORM, GROUP, ZEROS, SPAN, BLOCK_N, BLOCK_T, BLOCK_K, EVEN, EMULATED,
        )  # fmt: skip
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for tile in range(lo, hi):
            at = tile * BLOCK_K + k
            if EVEN:
                weight = tl.load(weight_row + at[None, :])
                x = tl.load(x_row + at[None, :], mask=(token < T)[:, None], other=0.0)
            else:
                weight = tl.load(weight_row + at[None, :], mask=in_row[:, None] & (at < K)[None, :], other=0.0)
                x = tl.load(x_row + at[None, :], mask=(token < T)[:, None] & (at < K)[None, :], other=0.0)
            if EMULATED:
                weight, x = weight.to(tl.float32), x.to(tl.float32)
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if RANK > 0 and split == 0:
        acc += _expanded(ids, low_ptr, b_ptr, block, token, N, RANK, COLUMNS, END_0, END_1, GATED, BLOCK_N,
                         BLOCK_T, EMULATED)  # fmt: skip
    if PARTS:
        at_row = (split * T + token).to(tl.int64)[:, None] * N
        tl.store(partial_ptr + at_row + row[None, :], tl.trans(acc), mask=(token < T)[:, None] & in_row[None, :])
    else:
        finish_splits(
            acc, block, split, tile_t, token, T, bias_ptr, residual_ptr, out_ptr, partial_ptr, arrived_ptr,
            N, RESIDUAL_ROW, BIAS, RESIDUAL, GATED, SPLITS, BLOCK_N, BLOCK_T,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["T"])
def norm_kernel(
    x_ptr,  # [T, K], or [PARTS, T, K] float32 parts of a sum
    bias_ptr, residual_ptr, norm_ptr, sum_ptr, out_ptr, exchange_ptr, T, X_ROW: tl.constexpr,
    RESIDUAL_ROW: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr,
    PARTS: tl.constexpr,  # 0: normalize x; else sum the parts, bias and residual, store that, and normalize it
    BIAS: tl.constexpr,
    RANKS: tl.constexpr,  # over which the sum of parts and bias is summed
    FEW: tl.constexpr,  # numbers, at most, that are summed in one trip
    ALIKE: tl.constexpr,  # sum parts, then the bias, then the residual, as products that make all parts themselves
    BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    if PARTS == 0:
        x = tl.load(x_ptr + token * X_ROW + k, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(residual_ptr + token * RESIDUAL_ROW + k, mask=inside, other=0.0).to(tl.float32)
        if RANKS > 1:
            own = tl.zeros([BLOCK_K], tl.float32)
            if BIAS:
                own += tl.load(bias_ptr + k, mask=inside, other=0.0).to(tl.float32)
            for part in tl.static_range(PARTS):
                own += tl.load(x_ptr + (part * T + token) * K + k, mask=inside, other=0.0).to(tl.float32)
            half = exchange_half(exchange_ptr)
            x += sum_over_ranks(
                own, token, token * K + k, inside, T * K <= FEW, exchange_ptr, half, sum_ptr.dtype.element_ty, RANKS
            )
        elif ALIKE:
            own = tl.zeros([BLOCK_K], tl.float32)
            for part in tl.static_range(PARTS):
                own += tl.load(x_ptr + (part * T + token) * K + k, mask=inside, other=0.0).to(tl.float32)
            if BIAS:
                own += tl.load(bias_ptr + k, mask=inside, other=0.0).to(tl.float32)
            x += own
        else:
            if BIAS:
                x += tl.load(bias_ptr + k, mask=inside, other=0.0).to(tl.float32)
            for part in tl.static_range(PARTS):
                x += tl.load(x_ptr + (part * T + token) * K + k, mask=inside, other=0.0)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * K + k, rounded, mask=inside)
        x = rounded.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + EPS)
    if norm_ptr.dtype.element_ty == out_ptr.dtype.element_ty:
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * K + k, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(gate_up_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, EMULATED: tl.constexpr):
    gdc_wait_early(EMULATED)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = gate_up_ptr + token * (2 * N) + n
    gate = tl.load(row, mask=n < N, other=0.0).to(tl.float32)
    value = tl.load(row + N, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + n, _gate((gate, value)).to(out_ptr.dtype.element_ty), mask=n < N)


_ENCODED = ("weight_OI", "scales_GO", "zeros_GO")
_GATE_BLOCK = 1024
_EXCHANGED = 1024  # numbers of a program that sums over ranks, at least: Triton 3.6 aborts on some smaller blocks


def short(site: CallSite) -> bool:
    """Whether the products of this file serve a site: few rows, and what `half` asks for."""
    return site.rows("x_TI") <= MOST_ROWS and half(site)


def plain(site: CallSite) -> bool:
    """Whether the library's product and the kernels around it serve a site."""
    return site.args["scales_GO"] is None and site.args["a_LRI"] is None and half(site)


def half(site: CallSite) -> bool:
    """Whether the other kernels of this file serve a site: one half-precision dtype, norms also in float32, contiguous
    and aligned; encoded weights with groups of whole tiles."""
    x_TI, form, group, widths = (site.args[n] for n in ("x_TI", "form", "group", "widths"))
    tensors = {n: t for n, t in site.args.items() if isinstance(t, Tensor) and n != "adapter_ids_T"}
    norms = [tensors.pop(n) for n in ("norm_I", "norm_O") if n in tensors]
    encoded = [tensors.pop(n) for n in _ENCODED if form and n in tensors]
    return (
        x_TI.dtype in (torch.bfloat16, torch.float16)
        and all(t.dtype == x_TI.dtype and t.stride(-1) == 1 for t in tensors.values())
        and all(t.is_contiguous() for t in (*encoded, *norms))
        and all(t.dtype in (x_TI.dtype, torch.float32) for t in norms)
        and x_TI.shape[1] % (16 if form else 8) == 0
        and group % (64 if BITS.get(form) == 8 else 32) == 0
        and len(widths or ()) <= MOST_MATRICES
    )


def one_row(site: CallSite) -> bool:
    """Whether the row kernels serve a site."""
    one_scale = site.args["group"] == 0 and site.args["zeros_GO"] is None
    return site.rows("x_TI") == 1 and half(site) and (site.args["form"] == "" or one_scale)


@fused_linear.impl("triton_row", device="cuda", supports=one_row, configs=row_configs)
def triton_row(
    x_TI: Tensor, matrix: Matrix, before: Norm | None, residual_TN: Tensor | None, gated: bool, lora: LowRank | None,
    **config: int,
) -> Tensor:  # fmt: skip
    """One row of x."""
    out_TN = x_TI.new_empty((x_TI.shape[0], matrix.width(gated)))
    launch_row(x_TI, matrix, out_TN, config, before, residual_TN, gated, shrunk(x_TI, lora, norm=before))
    return out_TN


def launch_row(
    x_TI: Tensor,
    matrix: Matrix,
    out_TN: Tensor,
    config: Config,
    norm: Norm | None = None,
    residual_TN: Tensor | None = None,
    gated: bool = False,
    adapters: Adapters | None = None,
) -> None:
    """Products of one row of x with the weights into ``out_TN`` [1, N], of any float dtype."""
    weight_OI, bias_O, scales_GO, _, form, _ = matrix
    norm_I, eps = norm or (None, 0.0)
    N, K = weight_OI.shape[0], x_TI.shape[1]
    block_n, warps = config["block_n"], config["warps"]
    others = [x_TI if t is None else t for t in (bias_O, norm_I, residual_TN)]
    last, ranks = (out_TN, *_tables(adapters, x_TI)), _ranks(adapters)
    # Triton gives tiles of fewer elements than threads the layout of the weights' tile, 64 registers a thread.
    block_r = max(triton.next_power_of_2(ranks["RANK"]), 32 * warps // block_n)
    constants: dict[str, Any] = {
        "WEIGHT_ROW": weight_OI.stride(0), "N": N, "K": K, "EPS": eps, "NORM": norm_I is not None,
        "BIAS": bias_O is not None, "RESIDUAL": residual_TN is not None, "GATED": gated,
        "BLOCK_N": block_n, "BLOCK_K": config["block_k"], "EMULATED": triton.knobs.runtime.interpret,
        "num_warps": warps, "BLOCK_R": block_r, **{n: ranks[n] for n in ("RANK", "END_0", "END_1")},
    }  # fmt: skip
    if scales_GO is None:
        launch_triton(row_kernel, (-(-N // block_n),), x_TI, weight_OI, *others, *last, **constants)
    else:
        constants |= {"FORM": form, "SPAN": span_of(form, K, 0)}
        launch_triton(encoded_row_kernel, (-(-N // block_n),), x_TI, weight_OI, scales_GO, *others, *last, **constants)


def _library(site: CallSite) -> bool:
    """Whether the library's product is worth trying. Gated ones of many rows are faster there for a moment, in which
    they are timed; in a prompt, at the power limit of an H200, `gluon_gated` is, which moves less."""
    return plain(site) and not (site.rows("x_TI") > MOST_ROWS and read_by_tma(site))


@fused_linear.impl("cublas", device="cuda", supports=_library)
def cublas(x_TI: Tensor, matrix: Matrix, before: Norm | None, residual_TN: Tensor | None, gated: bool) -> Tensor:
    """The library's product with kernels before and after it."""
    x_TI = normalized(x_TI, before)
    out_TN = torch.nn.functional.linear(x_TI, matrix.weight_OI, matrix.bias_O)
    if gated:
        gate_up_T2N, out_TN = out_TN, x_TI.new_empty((x_TI.shape[0], matrix.width(gated)))
        N = out_TN.shape[1]
        launch_triton(
            _gate_kernel, (x_TI.shape[0], -(-N // _GATE_BLOCK)), gate_up_T2N, out_TN, N=N, BLOCK=_GATE_BLOCK,
            EMULATED=triton.knobs.runtime.interpret, num_warps=4,
        )  # fmt: skip
    return out_TN if residual_TN is None else residual_TN + out_TN


def _ahead(inner: int, row: int, config: Config) -> int:
    """Bytes of a program's part of a weight row (of ``row`` bytes) that are worth fetching early: up to 512, a power
    of two."""
    tiles = -(-inner // config["block_k"])
    part = -(-tiles // config["splits"]) * config["block_k"] * row // inner
    ahead = 1 << (min(512, part, row).bit_length() - 1)
    return ahead if ahead >= 128 else 0


def launch_norm(
    x: Tensor,
    norm_I: Tensor,
    eps: float,
    out_TI: Tensor,
    parts: int = 0,
    bias_O: Tensor | None = None,
    residual_TI: Tensor | None = None,
    sum_TI: Tensor | None = None,
    ranks: int = 1,
    alike: bool = False,
) -> None:
    """Normalize the rows of x [T, I] into ``out_TI``; with ``parts``, the rows of their sum with bias and residual.
    ranks: over which parts and bias are summed first. alike: sum in the order of products that make all parts
    themselves."""
    T, K = out_TI.shape
    launch_triton(
        norm_kernel, (T,), x, *(norm_I if t is None else t for t in (bias_O, residual_TI)), norm_I,
        norm_I if sum_TI is None else sum_TI, out_TI, exchange(x, ranks) if ranks > 1 else norm_I, T,
        X_ROW=0 if parts else x.stride(0), RESIDUAL_ROW=0 if residual_TI is None else residual_TI.stride(0),
        K=K, EPS=eps, PARTS=parts, BIAS=bias_O is not None, RANKS=ranks,
        FEW=one_trip(ranks, out_TI.element_size()) if ranks > 1 else 0, ALIKE=alike,
        BLOCK_K=max(1 << (K - 1).bit_length(), _EXCHANGED if ranks > 1 else 1), EMULATED=triton.knobs.runtime.interpret,
        num_warps=_norm_warps(K, ranks),
    )  # fmt: skip


def _norm_warps(K: int, ranks: int) -> int:
    """Of a row. What comes from other ranks is written, awaited and read by 16 bytes of a thread."""
    if ranks > 1:
        return min(16, max(4, (1 << (K - 1).bit_length()) // 256))
    return 8 if K > 2048 else 4


def normalized(x_TI: Tensor, norm: Norm | None) -> Tensor:
    """x_TI [T, I] as by `rms_norm`, contiguous; or as it is without a norm."""
    if norm is None:
        return x_TI
    normed_TI = torch.empty_like(x_TI, memory_format=torch.contiguous_format)
    launch_norm(x_TI, *norm, normed_TI)
    return normed_TI


def launch_tiles(
    x_TI: Tensor,
    matrix: Matrix,
    out: Tensor,
    config: Config,
    residual_TN: Tensor | None = None,
    gated: bool = False,
    norm: Norm | None = None,
    parts: bool = False,
    adapters: Adapters | None = None,
) -> None:
    """Products of x with the weights into ``out`` [T, N], or, with ``parts``, their parts into [splits, T, O]. norm: of
    one row of x. adapters: what is added to the products."""
    weight_OI, bias_O, scales_GO, zeros_GO, form, group = matrix
    norm_I, eps = norm or (None, 0.0)
    (T, K), N = x_TI.shape, weight_OI.shape[0]
    blocks, splits = -(-N // config["block_n"]), config["splits"]
    count = blocks * config["token_tiles"] if splits > 1 and not parts else 0
    partial = out
    if count:
        size = count * splits * config["block_n"] * config["block_t"]
        partial = torch.empty(size, dtype=torch.float32, device=x_TI.device)
    launch_triton(
        tile_kernel, (blocks, splits, config["token_tiles"]),
        x_TI, weight_OI, *(weight_OI if t is None else t for t in (scales_GO, zeros_GO)),
        *(x_TI if t is None else t for t in (bias_O, norm_I, residual_TN)), out, partial,
        zeroed(x_TI, count) if count else x_TI, *_tables(adapters, x_TI), T,
        X_ROW=x_TI.stride(0), WEIGHT_ROW=weight_OI.stride(0),
        RESIDUAL_ROW=0 if residual_TN is None else residual_TN.stride(0), N=N, K=K, EPS=eps,
        NORM=norm is not None, BIAS=bias_O is not None, GATED=gated,
        RESIDUAL=residual_TN is not None,
        FORM=form, GROUP=group, ZEROS=zeros_GO is not None, PARTS=parts, **_ranks(adapters), BLOCK_T=config["block_t"],
        BLOCK_N=config["block_n"], BLOCK_K=config["block_k"],
        SPAN=span_of(form, K, group) if form else 0, SPLITS=splits,
        AHEAD=_ahead(K, weight_OI.stride(0) * weight_OI.element_size(), config),
        DIRECT=config["direct"], WARPS=config["warps"],
        EMULATED=triton.knobs.runtime.interpret, num_warps=config["warps"], num_stages=config["stages"],
    )  # fmt: skip


def _tables(adapters: Adapters | None, x_TI: Tensor) -> tuple[Tensor, ...]:
    """What kernels read of adapters; anything if there are none."""
    return adapters[:3] if adapters else (x_TI, x_TI, x_TI)


def _ranks(adapters: Adapters | None) -> dict[str, int]:
    return adapters.constants if adapters else {"RANK": 0, "COLUMNS": 0, "END_0": 0, "END_1": 0}


@fused_linear.impl("triton_tile", device="cuda", supports=short, configs=beside_rows, row_order=sum_order)
def triton_tile(
    x_TI: Tensor, matrix: Matrix, before: Norm | None, residual_TN: Tensor | None, gated: bool, lora: LowRank | None,
    **config: int,
) -> Tensor:  # fmt: skip
    """Up to ``MOST_ROWS`` rows of x."""
    within = before if config["norm"] == 1 else None
    x_TI = x_TI if within else normalized(x_TI, before)
    adapters = shrunk(x_TI, lora, config["low_rows"], config["low_splits"], within)
    out_TN = x_TI.new_empty((x_TI.shape[0], matrix.width(gated)))
    launch_tiles(x_TI, matrix, out_TN, config, residual_TN, gated, within, adapters=adapters)
    return out_TN
