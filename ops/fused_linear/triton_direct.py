"""Triton: products of few rows of x with encoded weights, which go from memory straight to the registers that the
tensor cores read, without a stop in shared memory.

The warps of a program divide the inner dimension and add their sums at the end, so that even small matrices keep as
many reads under way as memory answers. What makes it direct is the order in which elements are loaded: a thread holds
16 neighbouring bytes of a row of weights, and of x the same entries; which of them is which inner entry of a 16 by 8 by
16 product is free, as long as both operands agree. So a load is laid out in the product's own layout, and Triton has
nothing to exchange between threads. (Its order of dimensions is what makes Triton choose that layout.)
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from graphllm.ops.fused_linear.triton_encoded import lost_exponent, numbers_of, scales_at


@triton.jit
def _loaded_order(values, COUNT: tl.constexpr):
    """[COUNT * 8] in the order of loads: [8, 1, COUNT, 1, 1]."""
    return tl.reshape(tl.trans(tl.reshape(values, [COUNT, 8])), [8, 1, COUNT, 1, 1])


@triton.jit
def _operand(loaded, COUNT: tl.constexpr, CHUNKS: tl.constexpr, WARPS: tl.constexpr):
    """[WARPS, rows, entries] of what was loaded as [8, WARPS, COUNT, CHUNKS, 32]."""
    parts = tl.reshape(loaded, [8, WARPS, COUNT, CHUNKS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (1, 2, 0, 3, 5, 6, 4, 7)), [WARPS, COUNT * 8, CHUNKS * 32])


@triton.jit
def _less(numbers, zeros, EMULATED: tl.constexpr):
    if EMULATED:
        return numbers - zeros.to(numbers.dtype)
    elif numbers.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, zeros.to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [numbers, zeros.to(tl.float16)], dtype=tl.float16, is_pure=True,
            pack=2,
        )  # fmt: skip


@triton.jit
def _larger(x):
    """bf16 x times 2 ** 100: what numbers that are too small for products in float32 are multiplied by."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x71807180; mul.rn.bf16x2 $0, $1, c; }", "=r,r", [x], dtype=tl.bfloat16,
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def direct_product(
    weight_ptr,
    row,  # [BLOCK_N] int64, of the weights
    in_row,
    scale_at,  # [BLOCK_N] pointers to the rows' first scales
    zero_at,  # and zero points
    x_ptr,
    x_row,  # [BLOCK_T] int64
    there,
    X_ROW: tl.constexpr,
    WEIGHT_ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,  # from a group to the next
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a multiple of 16
    BLOCK_T: tl.constexpr,  # a multiple of 8
    SPAN: tl.constexpr,
    WARPS: tl.constexpr,  # of the program
    WAIT: tl.constexpr,  # for the kernel that makes x, once the first weights are asked for
    EMULATED: tl.constexpr,
):
    """[BLOCK_N, BLOCK_T] float32: rows of weights times rows of x."""
    dtype: tl.constexpr = tl.float32 if EMULATED else x_ptr.dtype.element_ty
    CODES: tl.constexpr = 4 if FORM == "int4" or FORM == "e2m1" else 2
    WIDTH: tl.constexpr = SPAN // CODES
    CHUNKS: tl.constexpr = WIDTH // 32
    SPANS: tl.constexpr = (K + SPAN - 1) // SPAN
    STEPS: tl.constexpr = (SPANS + WARPS - 1) // WARPS
    TOGETHER: tl.constexpr = CODES if GROUP == 0 or GROUP >= SPAN else GROUP // WIDTH  # codes of an int16: one scale
    LOST: tl.constexpr = 0 if EMULATED else lost_exponent(FORM, "bf16" if dtype == tl.bfloat16 else "f16")
    LARGER: tl.constexpr = 100 if LOST > 100 else 0
    warp = tl.arange(0, WARPS)
    span = warp[None, :, None, None, None]
    entry = (tl.arange(0, CHUNKS) * 32)[:, None] + tl.arange(0, 32)[None, :]
    entry = entry[None, None, None, :, :]
    in_rows = _loaded_order(in_row, BLOCK_N // 8)
    weight_at = weight_ptr + _loaded_order(row, BLOCK_N // 8) * WEIGHT_ROW + span * WIDTH + entry
    there = _loaded_order(there, BLOCK_T // 8)
    x_at = x_ptr + _loaded_order(x_row, BLOCK_T // 8) * X_ROW + span * SPAN + entry
    if ZEROS:
        zeros_at = _loaded_order(zero_at, BLOCK_N // 8)
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
    words = tl.load(weight_at, mask=in_rows & (span < SPANS), other=0)
    after = words
    if STEPS > 1:
        after = tl.load(weight_at + WARPS * WIDTH, mask=in_rows & (WARPS + span < SPANS), other=0)
    if WAIT and not EMULATED:
        tl.extra.cuda.gdc_wait()
    for step in tl.static_range(STEPS):
        numbers = numbers_of(words, dtype, FORM, EMULATED, True)
        words = after
        if step + 2 < STEPS:
            more = (step + 2) * WARPS
            after = tl.load(weight_at + more * WIDTH, mask=in_rows & (more + span < SPANS), other=0)
        part = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
        for j in tl.static_range(CODES):
            begin = (step * WARPS + span) * SPAN
            inside = begin < K if K % SPAN == 0 else begin + j * WIDTH + entry < K
            x = tl.load(x_at + (step * WARPS * SPAN + j * WIDTH), mask=there & inside, other=0.0)
            if EMULATED:
                x = x.to(tl.float32)
            elif LARGER:
                x = _larger(x)
            number = numbers[j]
            first = (j // TOGETHER * TOGETHER) * WIDTH
            if ZEROS:
                at = begin + first
                zero = tl.load(zeros_at + at // (GROUP if GROUP else K) * SCALE_ROW, mask=in_rows & (at < K), other=0)
                number = _less(number, zero, EMULATED)
            number = _operand(number, BLOCK_N // 8, CHUNKS, WARPS)
            x = tl.trans(_operand(x, BLOCK_T // 8, CHUNKS, WARPS), (0, 2, 1))
            if GROUP == 0:
                acc = tl.dot(number, x, acc, input_precision="ieee")
            else:
                part = tl.dot(number, x, part, input_precision="ieee")
                if (j + 1) % TOGETHER == 0:
                    at = (step * WARPS + warp) * SPAN + first
                    scaled = in_row[None, :] & (at < K)[:, None]  # what pads a row has no scale
                    acc += part * scales_at(scale_at[None, :] + (at // GROUP * SCALE_ROW)[:, None], scaled)[:, :, None]
                    part = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
    out = tl.sum(acc, axis=0)
    if GROUP == 0:
        out *= scales_at(scale_at, in_row)[:, None]
    return out * 2.0 ** (LOST - LARGER)
