"""Triton: products of many rows of x with weights, each row computed as `tile_kernel` computes it among few.

The tensor cores add the products of 16 inner entries at a time, in an order that depends neither on how many rows of x
an instruction takes nor on where a row is among them. What is left is where sums begin anew: few rows divide the inner
dimension among programs, and the last of these adds their sums in order. Here one program makes the same sums one after
another and adds them in the same order.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.fused_linear.launch_constants import Config, is_ordered, ordered_configs, sum_order
from graphllm.ops.fused_linear.op import MOST_ROWS, fused_linear
from graphllm.ops.fused_linear.triton_fused_linear import finish_tile, gate, half, normalized, weight_rows, width_of


@triton.jit
def ordered_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    T,
    X_ROW: tl.constexpr,
    WEIGHT_ROW: tl.constexpr,
    RESIDUAL_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANGES: tl.constexpr,  # parts of the sum
    TOGETHER: tl.constexpr,  # tiles of tokens that go over the weights side by side
    EMULATED: tl.constexpr,
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PER_RANGE: tl.constexpr = (TILES + RANGES - 1) // RANGES
    EVEN: tl.constexpr = (N % BLOCK_N == 0) and (K % BLOCK_K == 0)
    token_tiles = tl.num_programs(0) // BLOCKS
    group = tl.program_id(0) // (TOGETHER * BLOCKS)
    beside = tl.minimum(token_tiles - group * TOGETHER, TOGETHER)
    inside = tl.program_id(0) % (TOGETHER * BLOCKS)
    block = inside // beside
    token = (group * TOGETHER + inside % beside) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = token < T
    row, in_row = weight_rows(block, N, GATED, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + row.to(tl.int64)[:, None] * WEIGHT_ROW + k[None, :]
    # Rows beyond the last one are computed from the last one: a load without a mask takes fewer registers.
    x_at = x_ptr + tl.minimum(token, T - 1).to(tl.int64)[:, None] * X_ROW + k[None, :]
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for tile in range(TILES):
        if EVEN:
            weight = tl.load(weight_at)
            x = tl.load(x_at)
        else:
            in_k = (tile * BLOCK_K + k < K)[None, :]
            weight = tl.load(weight_at, mask=in_row[:, None] & in_k, other=0.0)
            x = tl.load(x_at, mask=in_k, other=0.0)
        weight_at += BLOCK_K
        x_at += BLOCK_K
        if EMULATED:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        if RANGES > 1:
            if (tile + 1) % PER_RANGE == 0:
                total += acc
                acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if RANGES > 1:
        acc += total
    finish_tile(acc, block, token, T, bias_ptr, residual_ptr, out_ptr,
                N, RESIDUAL_ROW, BIAS, RESIDUAL, GATED, BLOCK_N, BLOCK_T)  # fmt: skip


@triton.jit
def descriptor_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    T,
    X_ROW: tl.constexpr,
    WEIGHT_ROW: tl.constexpr,
    RESIDUAL_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of weights, of the gate and of the value half as many
    BLOCK_K: tl.constexpr,
    RANGES: tl.constexpr,  # parts of the sum
    TOGETHER: tl.constexpr,  # tiles of tokens that go over the weights side by side
    PROGRAMS: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Programs take one tile after another, each with two descriptors for all of them."""
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    WIDTH: tl.constexpr = N // 2 if GATED else N
    BLOCKS: tl.constexpr = (WIDTH + HALF - 1) // HALF
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PER_RANGE: tl.constexpr = (TILES + RANGES - 1) // RANGES
    weights = tl.make_tensor_descriptor(weight_ptr, [N, K], [WEIGHT_ROW, 1], [HALF, BLOCK_K])
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    rows = tl.make_tensor_descriptor(x_ptr, [T, K], [X_ROW, 1], [BLOCK_T, BLOCK_K])
    token_tiles = (T + BLOCK_T - 1) // BLOCK_T
    for i in tl.range(tl.program_id(0), token_tiles * BLOCKS, PROGRAMS):
        group = i // (TOGETHER * BLOCKS)
        beside = tl.minimum(token_tiles - group * TOGETHER, TOGETHER)
        inside = i % (TOGETHER * BLOCKS)
        first = inside // beside * HALF
        first_token = (group * TOGETHER + inside % beside) * BLOCK_T
        acc = tl.zeros([HALF, BLOCK_T], tl.float32)
        value = acc
        total = acc
        total_value = acc
        for tile in range(TILES):
            at = tile * BLOCK_K
            weight = weights.load([first, at])
            x = rows.load([first_token, at])
            if EMULATED:
                weight, x = weight.to(tl.float32), x.to(tl.float32)
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
            if GATED:
                more = weights.load([first + WIDTH, at])
                if EMULATED:
                    more = more.to(tl.float32)
                value = tl.dot(more, tl.trans(x), value, input_precision="ieee")
            if RANGES > 1:
                if (tile + 1) % PER_RANGE == 0:
                    total += acc
                    acc = tl.zeros([HALF, BLOCK_T], tl.float32)
                    if GATED:
                        total_value += value
                        value = tl.zeros([HALF, BLOCK_T], tl.float32)
        if RANGES > 1:
            acc += total
            if GATED:
                value += total_value
        column = first + tl.arange(0, HALF)
        in_row = column < WIDTH
        if BIAS:
            acc += tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)[:, None]
            if GATED:
                value += tl.load(bias_ptr + WIDTH + column, mask=in_row, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = gate((acc, value))
        out = tl.trans(acc)
        token = (first_token + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        there = (token < T) & in_row[None, :]
        if RESIDUAL:
            at_residual = residual_ptr + token * RESIDUAL_ROW + column[None, :]
            out += tl.load(at_residual, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * WIDTH + column[None, :], out.to(out_ptr.dtype.element_ty), mask=there)


def launch_ordered(
    x_TI: Tensor,
    weight_OI: Tensor,
    out_TN: Tensor,
    config: Config,
    bias_O: Tensor | None = None,
    residual_TN: Tensor | None = None,
    gated: bool = False,
) -> None:
    """Products of x with the weights into ``out_TN``."""
    (T, K), N, block_t = x_TI.shape, weight_OI.shape[0], config["block_t"]
    if programs := config["programs"]:
        kernel, grid, own = descriptor_kernel, (programs,), {"PROGRAMS": programs}
    else:
        kernel, grid, own = ordered_kernel, (-(-N // config["block_n"]) * ((T + block_t - 1) // block_t),), {}
    launch_triton(
        kernel, grid,
        x_TI, weight_OI, *(x_TI if t is None else t for t in (bias_O, residual_TN)), out_TN, T,
        X_ROW=x_TI.stride(0), WEIGHT_ROW=weight_OI.stride(0),
        RESIDUAL_ROW=0 if residual_TN is None else residual_TN.stride(0), N=N, K=K, BIAS=bias_O is not None,
        RESIDUAL=residual_TN is not None, GATED=gated, BLOCK_T=block_t, BLOCK_N=config["block_n"],
        BLOCK_K=config["block_k"], RANGES=config["ranges"], TOGETHER=8, EMULATED=triton.knobs.runtime.interpret,
        num_warps=config["warps"], num_stages=config["stages"], **own,
    )  # fmt: skip


def many(site: CallSite) -> bool:
    """Whether this file's kernel serves a site: more rows than those of the tile kernel, to come out as by that."""
    return site.deterministic and site.rows("x_TI") > MOST_ROWS and is_ordered(site) and half(site)


@fused_linear.impl("triton_ordered", device="cuda", supports=many, configs=ordered_configs, row_order=sum_order)
def triton_ordered(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    gated: bool = False,
    **config: int,
) -> Tensor:
    """Any number of rows of x."""
    if norm_I is not None:
        x_TI = normalized(x_TI, norm_I, eps)
    out_TN = x_TI.new_empty((x_TI.shape[0], width_of(weight_OI, gated)))
    launch_ordered(x_TI, weight_OI, out_TN, config, bias_O, residual_TN, gated)
    return out_TN
