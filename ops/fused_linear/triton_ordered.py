"""Triton: products of many rows of x with weights, each row computed as `tile_kernel` computes it among few.

The tensor cores add the products of 16 inner entries at a time, in an order that depends neither on how many rows of x
an instruction takes nor on where a row is among them. What is left is where sums begin anew: few rows divide the inner
dimension among programs, and what these make is added in order. Here one program may make the same sums one after
another and add them in the same order.

The tensor memory accelerator brings tiles; programs take one after another, with the same two descriptors for all.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.fused_linear.launch_constants import Config, is_ordered, ordered_configs, sum_order
from graphllm.ops.fused_linear.op import fused_linear
from graphllm.ops.fused_linear.triton_fused_linear import half, normalized, silu_gate, width_of

_FEWEST = 64  # rows of x up to which the tile kernel is as fast as memory


@triton.jit
def _step(
    acc, value, weights, rows, first, first_token, step,
    WIDTH: tl.constexpr, GATED: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """acc, and value with a gate, with the products of BLOCK_K inner entries."""
    at = step * BLOCK_K
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
    return acc, value


@triton.jit
def _steps(
    acc, value, weights, rows, first, first_token, lo, hi,
    WIDTH: tl.constexpr, GATED: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    for step in range(lo, hi):
        acc, value = _step(acc, value, weights, rows, first, first_token, step, WIDTH, GATED, BLOCK_K, EMULATED)
    return acc, value


@triton.jit
def ordered_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,  # float32: [RANGES, T, N] if PARTS, else [PROGRAMS, BLOCK_N, BLOCK_T] if RANGES > 1 and not KEPT
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
    BLOCK_N: tl.constexpr,  # rows of weights: with a gate, half of them of that and half of the value
    BLOCK_K: tl.constexpr,
    RANGES: tl.constexpr,  # parts of the sum
    KEPT: tl.constexpr,  # the sum of the ranges so far stays in registers
    PARTS: tl.constexpr,  # each range is an item of work, and left to a kernel that follows
    TOGETHER: tl.constexpr,  # tiles of tokens that go over the weights side by side
    PROGRAMS: tl.constexpr,
    EMULATED: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    WIDTH: tl.constexpr = N // 2 if GATED else N
    BLOCKS: tl.constexpr = (WIDTH + HALF - 1) // HALF
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PER_RANGE: tl.constexpr = (STEPS + RANGES - 1) // RANGES
    ITEMS: tl.constexpr = RANGES if PARTS else 1  # of a tile
    weights = tl.make_tensor_descriptor(weight_ptr, [N, K], [WEIGHT_ROW, 1], [HALF, BLOCK_K])
    if not EMULATED:
        # The next kernel may start when all programs are here, so the one before is over: of three kernels the last one
        # never writes its descriptor, before it waits, where the first one still reads its own.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.make_tensor_descriptor(x_ptr, [T, K], [X_ROW, 1], [BLOCK_T, BLOCK_K])
    token_tiles = (T + BLOCK_T - 1) // BLOCK_T
    for item in tl.range(tl.program_id(0), token_tiles * BLOCKS * ITEMS, PROGRAMS):
        i = item // ITEMS
        group = i // (TOGETHER * BLOCKS)
        beside = tl.minimum(token_tiles - group * TOGETHER, TOGETHER)
        inside = i % (TOGETHER * BLOCKS)
        first = inside // beside * HALF
        first_token = (group * TOGETHER + inside % beside) * BLOCK_T
        acc = tl.zeros([HALF, BLOCK_T], tl.float32)
        value = acc
        if PARTS:
            lo = item % ITEMS * PER_RANGE
            acc, value = _steps(acc, value, weights, rows, first, first_token, lo,
                                       tl.minimum(lo + PER_RANGE, STEPS), WIDTH, GATED, BLOCK_K, EMULATED)  # fmt: skip
        elif RANGES == 1:
            acc, value = _steps(
                acc, value, weights, rows, first, first_token, 0, STEPS, WIDTH, GATED, BLOCK_K, EMULATED
            )
        elif KEPT:
            total = acc
            total_value = acc
            for step in range(STEPS):
                acc, value = _step(acc, value, weights, rows, first, first_token, step, WIDTH, GATED, BLOCK_K, EMULATED)
                if (step + 1) % PER_RANGE == 0:
                    total += acc
                    acc = tl.zeros([HALF, BLOCK_T], tl.float32)
                    if GATED:
                        total_value += value
                        value = tl.zeros([HALF, BLOCK_T], tl.float32)
            acc += total
            if GATED:
                value += total_value
        else:
            cell = (tl.arange(0, HALF) * BLOCK_T)[:, None] + tl.arange(0, BLOCK_T)[None, :]
            own = partial_ptr + tl.program_id(0).to(tl.int64) * (HALF * BLOCK_T) + cell
            for part in range(RANGES):
                lo = part * PER_RANGE
                acc, value = _steps(
                    tl.zeros([HALF, BLOCK_T], tl.float32), value, weights, rows, first, first_token, lo,
                    tl.minimum(lo + PER_RANGE, STEPS), WIDTH, False, BLOCK_K, EMULATED,
                )  # fmt: skip
                if part > 0:
                    acc += tl.load(own)
                if part < RANGES - 1:  # read again by the thread that writes it
                    tl.store(own, acc)
        column = first + tl.arange(0, HALF)
        in_row = column < WIDTH
        token = (first_token + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        there = (token < T) & in_row[None, :]
        if PARTS:
            at_part = partial_ptr + ((item % ITEMS) * T + token) * N + column[None, :]
            tl.store(at_part, tl.trans(acc), mask=there)
        else:
            if BIAS:
                acc += tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)[:, None]
                if GATED:
                    value += tl.load(bias_ptr + WIDTH + column, mask=in_row, other=0.0).to(tl.float32)[:, None]
            if GATED:
                acc = silu_gate((acc, value))
            out = tl.trans(acc)
            if RESIDUAL:
                at_residual = residual_ptr + token * RESIDUAL_ROW + column[None, :]
                out += tl.load(at_residual, mask=there, other=0.0).to(tl.float32)
            tl.store(out_ptr + token * WIDTH + column[None, :], out.to(out_ptr.dtype.element_ty), mask=there)


def launch_ordered(
    x_TI: Tensor,
    weight_OI: Tensor,
    out: Tensor,
    config: Config,
    bias_O: Tensor | None = None,
    residual_TN: Tensor | None = None,
    gated: bool = False,
) -> None:
    """Products of x with the weights into ``out`` [T, N], or, with the launch constant "parts", the ranges of their
    sums into [ranges, T, N]."""
    (T, K), N = x_TI.shape, weight_OI.shape[0]
    partial = out
    if config["ranges"] > 1 and not config["kept"] and not config["parts"]:
        size = config["programs"] * config["block_n"] * config["block_t"]
        partial = torch.empty(size, dtype=torch.float32, device=x_TI.device)
    launch_triton(
        ordered_kernel, (config["programs"],),
        x_TI, weight_OI, *(x_TI if t is None else t for t in (bias_O, residual_TN)), out, partial, T,
        X_ROW=x_TI.stride(0), WEIGHT_ROW=weight_OI.stride(0),
        RESIDUAL_ROW=0 if residual_TN is None else residual_TN.stride(0), N=N, K=K, BIAS=bias_O is not None,
        RESIDUAL=residual_TN is not None, GATED=gated, BLOCK_T=config["block_t"], BLOCK_N=config["block_n"],
        BLOCK_K=config["block_k"], RANGES=config["ranges"], KEPT=config["kept"] == 1, PARTS=config["parts"] == 1,
        TOGETHER=8, PROGRAMS=config["programs"], EMULATED=triton.knobs.runtime.interpret,
        num_warps=config["warps"], num_stages=config["stages"],
    )  # fmt: skip


def many(site: CallSite) -> bool:
    """Whether this file's kernel serves a site: more rows than those for which memory is the limit, to come out as by
    the tile kernel; rows of x and weights must begin at multiples of 16 bytes."""
    aligned = all(site.args[n].stride(0) % 8 == 0 for n in ("x_TI", "weight_OI"))
    return site.deterministic and site.rows("x_TI") > _FEWEST and aligned and is_ordered(site) and half(site)


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
