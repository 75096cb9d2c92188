"""quantize_rows on a GPU: one program a row, which it reads once."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.encodings.encoded_weights import span_of, width_of
from graphllm.ops.gemm.quantize_rows.op import LARGEST, quantize_rows


@triton.jit
def _row(x_ptr, at, K: tl.constexpr, GATED: tl.constexpr):
    x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    if GATED:
        x = x / (1.0 + tl.exp(-x)) * tl.load(x_ptr + K + at, mask=at < K, other=0.0).to(tl.float32)
    return x


@triton.jit
def float8_code(x):
    """An E4M3 number as int32, by hand: to the nearest, ties to even."""
    size = tl.abs(x)
    exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(size, 1e-30))), -6.0)
    steps = size * tl.exp2(3.0 - exponent)
    whole = tl.floor(steps)
    more = steps - whole
    odd = whole - 2.0 * tl.floor(whole * 0.5)
    whole += tl.where((more > 0.5) | ((more == 0.5) & (odd == 1.0)), 1.0, 0.0)
    code = whole.to(tl.int32) + (exponent.to(tl.int32) + 6) * 8
    return code + tl.where(x < 0, 128, 0)


@triton.jit
def _codes(low, high, EMULATED: tl.constexpr):
    """Two E4M3 numbers in an int16. By the instruction: ptxas 12.8 gets wrong what Triton makes of two conversions."""
    if EMULATED:
        return (float8_code(low) | (float8_code(high) << 8)).to(tl.int16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
        )


@triton.jit
def quantize_kernel(
    x_ptr, norm_ptr, codes_ptr, scales_ptr, X_ROW: tl.constexpr, K: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr,
    EPS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SPAN // 2
    w = tl.arange(0, BLOCK)
    low = w // HALF * SPAN + w % HALF
    high = low + HALF
    x_row = x_ptr + token * X_ROW
    a = _row(x_row, low, K, GATED)
    b = _row(x_row, high, K, GATED)
    if NORM:
        by = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / K + EPS)
        a *= by * tl.load(norm_ptr + low, mask=low < K, other=0.0).to(tl.float32)
        b *= by * tl.load(norm_ptr + high, mask=high < K, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(a), axis=0), tl.max(tl.abs(b), axis=0))
    scale = tl.maximum(largest / LARGEST, 1e-12)
    a = tl.clamp(a / scale, -LARGEST, LARGEST)
    b = tl.clamp(b / scale, -LARGEST, LARGEST)
    tl.store(codes_ptr + token * W + w, _codes(a, b, EMULATED), mask=w < W)
    tl.store(scales_ptr + token, scale)


def _supports(site: CallSite) -> bool:
    x_TI, norm_I = site.args["x_TI"], site.args["norm_I"]
    return (
        x_TI.dtype in (torch.bfloat16, torch.float16)
        and x_TI.stride(-1) == 1
        and (norm_I is None or (norm_I.dtype in (x_TI.dtype, torch.float32) and norm_I.is_contiguous()))
    )


@quantize_rows.impl("triton_row", device="cuda", supports=_supports)
def triton_row(
    x_TI: Tensor, norm_I: Tensor | None = None, eps: float = 0.0, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Normalized and gated rows are not rounded before."""
    T, inner = x_TI.shape[0], x_TI.shape[1] // (2 if gated else 1)
    width = width_of("float8", inner, 0)
    codes_TW = x_TI.new_empty((T, width), dtype=torch.int16)
    scales_T1 = x_TI.new_empty((T, 1), dtype=torch.float32)
    block = 1 << (width - 1).bit_length()
    launch_triton(
        quantize_kernel, (T,), x_TI, x_TI if norm_I is None else norm_I, codes_TW, scales_T1, X_ROW=x_TI.stride(0),
        K=inner, W=width, SPAN=span_of("float8", inner, 0), EPS=eps, NORM=norm_I is not None, GATED=gated,
        LARGEST=LARGEST, BLOCK=block, EMULATED=triton.knobs.runtime.interpret, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return codes_TW, scales_T1
