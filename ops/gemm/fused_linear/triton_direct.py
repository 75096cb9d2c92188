"""Triton: products of few rows of x with weights, encoded or not, which go from memory straight to the registers that
the tensor cores read, without a stop in shared memory.

The warps of a program divide the inner dimension and add their sums at the end, so that even small matrices keep as
many reads under way as memory answers. What makes it direct is the order in which elements are loaded: a thread holds
16 neighbouring bytes of a row of weights, and of x the same entries; which of them is which inner entry of a 16 by 8 by
16 product is free, as long as both operands agree. So a load is laid out in the product's own layout, and Triton has
nothing to exchange between threads. (Its order of dimensions is what makes Triton choose that layout.)
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from graphllm.ops.gemm.fused_linear.triton_encoded import as_float, less, lost_exponent, numbers_of, scales_at


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
    norm_ptr,  # [K], by which x is multiplied, or anything
    X_ROW: tl.constexpr, WEIGHT_ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,  # from a group to the next
    K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a multiple of 16
    BLOCK_T: tl.constexpr,  # a multiple of 8
    SPAN: tl.constexpr,
    WARPS: tl.constexpr,  # of the program
    AHEAD: tl.constexpr,  # steps of a warp with weights under way
    WAIT: tl.constexpr,  # for the kernel that makes x, once the first weights are asked for
    EMULATED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] float32: rows of weights times rows of x, or of x times the weights of a norm."""
    dtype: tl.constexpr = tl.float32 if EMULATED else x_ptr.dtype.element_ty
    CODES: tl.constexpr = 4 if FORM == "int4" or FORM == "e2m1" else 1 if FORM == "" else 2
    WIDTH: tl.constexpr = SPAN // CODES
    CHUNKS: tl.constexpr = WIDTH // 32
    SPANS: tl.constexpr = (K + SPAN - 1) // SPAN
    STEPS: tl.constexpr = (SPANS + WARPS - 1) // WARPS
    TOGETHER: tl.constexpr = CODES if GROUP == 0 or GROUP >= SPAN else GROUP // WIDTH  # codes of an int16: one scale
    LOST: tl.constexpr = 0 if EMULATED else lost_exponent(FORM, "bf16" if dtype == tl.bfloat16 else "f16")
    LARGER: tl.constexpr = 100 if LOST > 100 else 0
    ADDED: tl.constexpr = (136 if dtype == tl.bfloat16 else 1032) if FORM == "int4" and ZEROS and not EMULATED else 0
    KEPT: tl.constexpr = STEPS * WIDTH * CODES * BLOCK_T <= 4096  # x of a warp is few enough for registers
    warp = tl.arange(0, WARPS)
    span = warp[None, :, None, None, None]
    entry = (tl.arange(0, CHUNKS) * 32)[:, None] + tl.arange(0, 32)[None, :]
    entry = entry[None, None, None, :, :]
    in_rows = _loaded_order(in_row, BLOCK_N // 8)
    weight_at = weight_ptr + _loaded_order(row, BLOCK_N // 8) * WEIGHT_ROW + span * WIDTH + entry
    zeros_at = _loaded_order(zero_at, BLOCK_N // 8)
    there = _loaded_order(there, BLOCK_T // 8)
    x_at = x_ptr + _loaded_order(x_row, BLOCK_T // 8) * X_ROW + span * SPAN + entry
    norm_at = tl.broadcast_to(norm_ptr + span * SPAN + entry, x_at.shape)
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
    pending = ()
    for step in tl.static_range(AHEAD if AHEAD < STEPS else STEPS):
        constants = _constants(
            step, weight_at, zeros_at, scale_at, in_rows, in_row, span, warp, SCALE_ROW, K, GROUP, ZEROS, SPAN, WARPS,
            WIDTH, TOGETHER,
        )  # fmt: skip
        pending += (constants,)
    if WAIT and not EMULATED:
        tl.extra.cuda.gdc_wait()
    operands = ()
    if KEPT:
        for i in tl.static_range(STEPS * CODES):
            operand = _entries_of_x(
                x_at, norm_at, i // CODES, i % CODES, there, span, entry, K, SPAN, WARPS, WIDTH, BLOCK_T, NORM, LARGER,
                EMULATED,
            )  # fmt: skip
            operands += (operand,)
    for step in tl.static_range(STEPS):
        words, zeros, scales = pending[step]
        if FORM == "":
            numbers = (words.to(dtype),)
        else:
            numbers = numbers_of(words, dtype, FORM, EMULATED, FORM != "int4" or ADDED > 0)
        if step + AHEAD < STEPS:
            constants = _constants(
                step + AHEAD, weight_at, zeros_at, scale_at, in_rows, in_row, span, warp, SCALE_ROW, K, GROUP, ZEROS,
                SPAN, WARPS, WIDTH, TOGETHER,
            )  # fmt: skip
            pending += (constants,)
        part = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
        for j in tl.static_range(CODES):
            number = numbers[j]
            if ZEROS:
                number = less(number, zeros[j // TOGETHER] + ADDED, EMULATED)
            number = _operand(number, BLOCK_N // 8, CHUNKS, WARPS)
            if KEPT:
                x = operands[step * CODES + j]
            else:
                x = _entries_of_x(
                    x_at, norm_at, step, j, there, span, entry, K, SPAN, WARPS, WIDTH, BLOCK_T, NORM, LARGER, EMULATED
                )
            if GROUP == 0:
                acc = tl.dot(number, x, acc, input_precision="ieee")
            else:
                part = tl.dot(number, x, part, input_precision="ieee")
                if (j + 1) % TOGETHER == 0:
                    acc += part * as_float(scales[j // TOGETHER])[:, :, None]
                    part = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
    out = tl.sum(acc, axis=0)
    if GROUP == 0 and FORM != "":
        out *= scales_at(scale_at, in_row)[:, None]
    return out * 2.0 ** (LOST - LARGER)


@triton.jit
def _constants(
    step, weight_at, zeros_at, scale_at, in_rows, in_row, span, warp,
    SCALE_ROW: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, SPAN: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """What a step reads of a weight: int16 or plain numbers, and the zero points and scales of each of its groups."""
    begin = step * WARPS
    words = tl.load(weight_at + begin * WIDTH, mask=in_rows & ((begin + span) * SPAN < K), other=0,
                    eviction_policy="evict_first")  # fmt: skip
    zeros = ()
    scales = ()
    if GROUP != 0:
        for first in tl.static_range(0, SPAN, TOGETHER * WIDTH):
            if ZEROS:
                at = (begin + span) * SPAN + first
                zeros += (tl.load(zeros_at + at // GROUP * SCALE_ROW, mask=in_rows & (at < K), other=0),)
            at_warp = (begin + warp) * SPAN + first
            scaled = in_row[None, :] & (at_warp < K)[:, None]  # what pads a row has no scale
            scale = tl.load(scale_at[None, :] + (at_warp // GROUP * SCALE_ROW)[:, None], mask=scaled, other=0.0)
            scales += (scale,)
    elif ZEROS:
        zeros = (tl.load(zeros_at, mask=in_rows, other=0),)
    return words, zeros, scales


@triton.jit
def _entries_of_x(
    x_at, norm_at, step, j, there, span, entry,
    K: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
    NORM: tl.constexpr, LARGER: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """[WARPS, WIDTH, BLOCK_T] of x: what the j-th codes of a step are multiplied with."""
    begin = (step * WARPS + span) * SPAN
    inside = begin < K if K % SPAN == 0 else begin + j * WIDTH + entry < K
    first = step * WARPS * SPAN + j * WIDTH
    x = tl.load(x_at + first, mask=there & inside, other=0.0)
    if NORM:
        x = (x.to(tl.float32) * tl.load(norm_at + first, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    if EMULATED:
        x = x.to(tl.float32)
    elif LARGER:
        x = _larger(x)
    return tl.trans(_operand(x, BLOCK_T // 8, WIDTH // 32, WARPS), (0, 2, 1))
