"""Triton: products of some tokens with experts in four-bit floats, on the float8 tensor cores, without a loss.

A four-bit float is a float8 number once its bits are in their places: four codes move at a time, where 16-bit numbers
move in pairs, and moving bits is what limits products of experts that few tokens chose. Rows of x become two float8
numbers for each bf16 one, the nearest and the nearest to what is left, which together keep its 8 bits: entries smaller
than a row's largest by 2 ** 11 lose bits, down to 2 ** -19 of the largest. Every code is multiplied with both.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.encodings.encoded_weights import span_of
from graphllm.ops.gemm.fused_linear.triton_encoded import number_of
from graphllm.ops.gemm.fused_linear.triton_fused_linear import weight_rows
from graphllm.ops.gemm.quantize_rows.op import LARGEST
from graphllm.ops.gemm.quantize_rows.triton_quantize_rows import float8_code
from graphllm.ops.moe.fused_moe.operands import Experts, Route
from graphllm.ops.moe.fused_moe.triton_common import has_gate, pairs_in_slots, pairs_of, write_pairs

_GROUP = 32  # entries of one scale
_PADDED = 128  # rows of halves are a multiple of that, in entries
_WARPS = 4
_SLOTS = 16  # tokens of an expert that are multiplied at a time


@triton.jit
def _halves(a, b, EMULATED: tl.constexpr):
    """Two numbers as pairs of float8 in int16: the nearest ones, and the nearest to what is left."""
    if EMULATED:
        high_a, high_b = float8_code(a), float8_code(b)
        low_a = float8_code(a - number_of(high_a, "float8"))
        low_b = float8_code(b - number_of(high_b, "float8"))
        return (high_a | (high_b << 8)).to(tl.int16), (low_a | (low_b << 8)).to(tl.int16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 h; .reg .b16 p, q; .reg .f32 a, b; cvt.rn.satfinite.e4m3x2.f32 $0, $3, $2;"
            " cvt.rn.f16x2.e4m3x2 h, $0; mov.b32 {p, q}, h; cvt.f32.f16 a, p; cvt.f32.f16 b, q;"
            " sub.f32 a, $2, a; sub.f32 b, $3, b; cvt.rn.satfinite.e4m3x2.f32 $1, b, a; }",
            "=&h,=h,f,f", [a, b], dtype=(tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def halves_kernel(
    x_ptr,  # [T, K]
    halves_ptr,  # [T, WIDTH] int16: of each group the high parts in pairs, then the low parts
    scales_ptr,  # [T]
    X_ROW: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * X_ROW + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, 1e-30)
    even, odd = tl.split(tl.reshape(x / scale, [BLOCK // 2, 2]))
    high, low = _halves(even, odd, EMULATED)
    pair = tl.arange(0, BLOCK // 2)
    HALF: tl.constexpr = GROUP // 2
    to = halves_ptr + row * WIDTH + pair // HALF * GROUP + pair % HALF
    tl.store(to, high, mask=pair < WIDTH // 2)
    tl.store(to + HALF, low, mask=pair < WIDTH // 2)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _moved(words, EMULATED: tl.constexpr):
    """The four codes of every int16 as float8 numbers, 2 ** -6 of what they stand for."""
    if EMULATED:
        bits = words.to(tl.int32)
        numbers = ()
        for j in tl.static_range(4):
            numbers += (number_of(bits >> 4 * j, "e2m1") * 0.015625,)
        return numbers
    else:
        low: tl.constexpr = "prmt.b32 p, $4, $5, 0x6420; "
        high: tl.constexpr = "prmt.b32 p, $4, $5, 0x7531; "
        first: tl.constexpr = (
            "shl.b32 t, p, 4; and.b32 t, t, 0x80808080; shl.b32 s, p, 2; lop3.b32 {}, s, 0x1c1c1c1c, t, 0xEA; "
        )
        second: tl.constexpr = "shr.u32 s, p, 2; and.b32 s, s, 0x1c1c1c1c; lop3.b32 {}, p, 0x80808080, s, 0xEA; "
        return tl.inline_asm_elementwise(
            "{ .reg .b32 p, s, t; " + low + first.format("$0") + second.format("$1") + high + first.format("$2")
            + second.format("$3") + "}",
            "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _twice(numbers):
    """[rows, 2 * width]: numbers and the same again, for the high and the low parts of x."""
    pair = tl.permute(tl.join(numbers, numbers), (0, 2, 1))
    return tl.reshape(pair, [pair.shape[0], 2 * pair.shape[2]])


@triton.jit
def _scales_of(tile, scale_at, in_row, ROWS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """uint8 scales of a span's four groups; after the last one, where x is zero, any."""
    scales = ()
    for j in tl.static_range(4):
        group = tl.minimum(tile * 4 + j, K // GROUP - 1)
        if EVEN:
            scales += (tl.load(scale_at + group * ROWS),)
        else:
            scales += (tl.load(scale_at + group * ROWS, mask=in_row, other=0),)
    return scales


@triton.jit
def _together(scales, EMULATED: tl.constexpr):
    """Four uint8 in an int32. It changes its layout once where the four would one after the other, if Triton cannot
    look through it."""
    a, b, c, d = scales
    word = a.to(tl.int32) | (b.to(tl.int32) << 8) | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
    if not EMULATED:
        word = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=False, pack=1)
    return word


@triton.jit
def _power(word, J: tl.constexpr):
    """2 ** (the J-th byte - 127)."""
    bits = (word >> 1) if J == 3 else (word << (23 - 8 * J))
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _product(
    weight_row,  # [BLOCK_N, 1] pointers to the first codes of rows
    scale_at,  # [BLOCK_N] pointers to their first scales
    in_row,
    x_row,  # [SLOTS, 1] pointers to rows of halves
    there, ROWS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr, EVEN: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, SLOTS] float32: rows of weights times rows of halves. Scales are read a span ahead: they are too small
    to go through shared memory as the rest does."""
    acc = tl.zeros([BLOCK_N, SLOTS], tl.float32)
    SPANS: tl.constexpr = (K + SPAN - 1) // SPAN
    k = tl.arange(0, SPAN // 4)
    both = tl.arange(0, 2 * GROUP)
    scales = _scales_of(0, scale_at, in_row, ROWS, K, GROUP, EVEN)
    for tile in range(SPANS):
        at = weight_row + (tile * (SPAN // 4) + k)[None, :]
        words = tl.load(at) if EVEN else tl.load(at, mask=in_row[:, None], other=0)
        word = _together(scales, EMULATED)
        scales = _scales_of(tile + 1, scale_at, in_row, ROWS, K, GROUP, EVEN)
        numbers = _moved(words, EMULATED)
        for j in tl.static_range(4):
            x = tl.load(x_row + ((tile * 4 + j) * (2 * GROUP) + both)[None, :], mask=there[:, None], other=0.0)
            if EMULATED:
                x = x.to(tl.float32)
            part = tl.dot(_twice(numbers[j]), tl.trans(x), input_precision="ieee")
            acc += part * _power(word, j)[:, None]
    return acc * 64.0


@triton.jit(do_not_specialize_on_alignment=["T"])
def halves_experts_kernel(
    x_ptr,  # [T, X_ROW / 2] halves of tokens, or of pairs of a token and an expert
    row_scales_ptr,  # [T]
    weight_ptr,  # [N, ROWS, WEIGHT_ROW]
    scales_ptr,  # [N, K / 32, ROWS]
    bias_ptr,  # [N, ROWS]
    scale_ptr,  # [P] float32
    experts_ptr,  # [T, A]
    out_ptr,  # [P, ROWS / 2], or [P, ROWS]
    T,
    X_ROW: tl.constexpr,  # bytes
    WEIGHT_ROW: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    A: tl.constexpr, A_PAD: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr,  # of the two products: with an activation, from tokens; else scaled
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """Programs have some weight rows of one expert, and read them once for every SLOTS tokens that chose it."""
    gdc_wait_early(EMULATED)
    block = tl.program_id(0)
    expert = tl.program_id(1)
    row, in_row = weight_rows(block, ROWS, has_gate(FIRST, ACTIVATION), BLOCK_N)
    weight_row = weight_ptr + (expert.to(tl.int64) * ROWS + row)[:, None] * WEIGHT_ROW
    scale_at = scales_ptr + expert.to(tl.int64) * (K // GROUP * ROWS) + row
    pair = pairs_of(experts_ptr, expert, T, A, A_PAD, BLOCK_T)
    rank = tl.cumsum((pair >= 0).to(tl.int32), axis=0)
    for start in range(0, tl.max(rank, axis=0), SLOTS):
        of_slot = pairs_in_slots(pair, rank, start, SLOTS)
        from_row = tl.maximum(of_slot // A if FIRST else of_slot, 0)
        x_row = x_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True) + from_row.to(tl.int64)[:, None] * X_ROW
        acc = _product(
            weight_row, scale_at, in_row, x_row, of_slot >= 0, ROWS, K, GROUP, SPAN, BLOCK_N, SLOTS,
            ROWS % BLOCK_N == 0, EMULATED,
        )  # fmt: skip
        acc *= tl.load(row_scales_ptr + from_row, mask=of_slot >= 0, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + expert * ROWS + row, mask=in_row, other=0.0).to(tl.float32)[:, None]
        write_pairs(acc, of_slot, block, scale_ptr, out_ptr, ROWS, FIRST, ACTIVATION, LIMIT, BLOCK_N, SLOTS)


def supports_halves(site: CallSite) -> bool:
    """Of a site of the kernels for few tokens: whether weights and rows are what this file reads."""
    scales, zeros = site.args["gate_up_scales_NG2F"], site.args["gate_up_zeros_NG2F"]
    fits = site.args["form"] == "e2m1" and site.args["group"] == _GROUP and site.args["adapter_ids_T"] is None
    if not fits or scales.dtype != torch.uint8 or zeros is not None or site.args["x_TD"].dtype != torch.bfloat16:
        return False
    inner = (site.args["x_TD"].shape[1], *site.struct(Experts).sizes[1:])
    native = {"sm_89", "sm_90"} & set(site.target.arch) or not site.target.arch
    return bool(native) and all(n % _GROUP == 0 for n in inner)


def launch_halves(
    i: int, x: Tensor, out: Tensor, experts: Experts, route: Route, block_t: int, block_n: int, stages: int
) -> None:
    """The first or second product: x [T, D] into ``out`` [P, F], or x [P, F] into [P, D]."""
    (rows, K), (T, A), emulated = x.shape, route.experts_TA.shape, triton.knobs.runtime.interpret
    width = -(-K // _PADDED) * _PADDED
    halves, row_scales = x.new_empty((rows, width), dtype=torch.int16), x.new_empty((rows,), dtype=torch.float32)
    block = 1 << (width - 1).bit_length()
    launch_triton(
        halves_kernel, (rows,), x, halves, row_scales, X_ROW=x.stride(0), K=K, WIDTH=width, GROUP=_GROUP,
        LARGEST=LARGEST, BLOCK=block, EMULATED=emulated, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    weight, scales, bias = experts.weights[i], experts.scales[i], experts.biases[i]
    N, out_rows, weight_row = weight.shape
    launch_triton(
        halves_experts_kernel, (-(-out_rows // block_n), N), halves, row_scales, weight, scales,
        weight if bias is None else bias, *route, out, T, X_ROW=2 * width, WEIGHT_ROW=weight_row,
        ROWS=out_rows, K=K, GROUP=_GROUP, SPAN=span_of(experts.form, K, _GROUP), A=A, A_PAD=1 << (A - 1).bit_length(),
        BIAS=bias is not None, FIRST=i == 0, ACTIVATION=experts.activation, LIMIT=experts.limit,
        BLOCK_T=block_t, BLOCK_N=block_n, SLOTS=_SLOTS, EMULATED=emulated,
        num_warps=_WARPS, num_stages=stages,
    )  # fmt: skip
