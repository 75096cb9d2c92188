"""Products of one row of x with int4 weights in groups of 128, on Hopper in Gluon: weights wait in shared memory for x.

Weights are asked for before x is there, by asynchronous copies, which take neither registers nor threads that wait, so
that enough of them are under way for the memory of the GPU. As in `triton_direct` the warps of a program divide the
inner dimension and add their sums at the end.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphllm.ir import CallSite, GluonKernel
from graphllm.ops.gemm.fused_linear.gluon_int4 import ADDED, GROUP, SPAN, decoded, less, reads_int4, seen_as
from graphllm.ops.gemm.fused_linear.gluon_rows import (
    ROWS_AT_ONCE,
    added_up,
    copy,
    count,
    in_order,
    plus_product,
    row_of,
    steps_of,
    whole_lines,
    words_of,
)
from graphllm.ops.gemm.fused_linear.launch_constants import Config
from graphllm.ops.gemm.fused_linear.op import fused_linear
from graphllm.ops.gemm.fused_linear.triton_fused_linear import normalized
from graphllm.ops.gemm.linear.operands import Matrix, Norm

_CONFIGS = (  # warps of a program, steps with weights under way, registers of a thread
    (4, 2, 64), (8, 2, 0), (8, 4, 0),
)  # fmt: skip


@triton.constexpr_function
def _constants_of(inner, warps):
    """Groups of a program's steps, a power of two."""
    return (1 << (steps_of(inner, warps) - 1).bit_length()) * warps * 2


@gluon.jit
def _ask_for_weights(into, weights_at, step, copies: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    at = weights_at + step * (WARPS * 64)
    if (step + 1) * WARPS * SPAN > K:
        inside = (step * WARPS + count(copies, 5, 0, WARPS) < K // SPAN).broadcast_to(at.type.shape)
        copy(into, at, mask=inside, cache_modifier=".cg")
    else:
        copy(into, at, cache_modifier=".cg")
    async_copy.commit_group()


@gluon.jit
def _ask_for_constants(into, constants_ptr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr):
    """All scales, or zero points, of a program's rows: by step, half of a span, and warp."""
    GROUPS: gl.constexpr = _constants_of(K, WARPS)
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [16, 2, 1], [WARPS, 1, 1], [2, 1, 0])
    place = count(layout, 3, 0, GROUPS)
    group = (place // (2 * WARPS) * WARPS + place % WARPS) * 2 + place // WARPS % 2
    at = constants_ptr + group * N + row_of(count(layout, 3, 1, 2), count(layout, 3, 2, 8), gl.program_id(0), N, GATED)
    if GROUPS > K // GROUP:
        copy(into, at, mask=(group < K // GROUP).broadcast_to([GROUPS, 2, 8]))
    else:
        copy(into, at)


@gluon.jit
def _kept_x(x_ptr, K: gl.constexpr, WARPS: gl.constexpr):
    """x in shared memory, step by step: [codes of an int16, WARPS, 2, 32]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [4, 1, 2, 4], [1, WARPS, 1, 1], [3, 2, 1, 0])
    span = count(layout, 4, 1, WARPS)
    at = (span * 4 + count(layout, 4, 0, 4)) * 64 + count(layout, 4, 2, 2) * 32 + count(layout, 4, 3, 32)
    loaded = ()
    for step in gl.static_range(steps_of(K, WARPS)):
        inside = (step * WARPS + span < K // SPAN).broadcast_to([4, WARPS, 2, 32])
        loaded += (gl.load(x_ptr + step * (WARPS * SPAN) + at, mask=inside, other=0.0),)
    kept = ()
    for step in gl.static_range(steps_of(K, WARPS)):
        buffer = gl.allocate_shared_memory(gl.bfloat16, [4, WARPS, 2, 32], in_order(4), loaded[step])
        kept += (seen_as(buffer, [4, WARPS, 2, 32], in_order(3)),)
    return kept


@gluon.jit
def _plus_step(
    acc, word, scales, zeros, step, kept,
    words: gl.constexpr, K: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The sums and what a step adds: two groups of each warp."""
    mma: gl.constexpr = acc.type.layout
    for u in gl.static_range(2):
        numbers = decoded(word, u)
        if ZEROS:
            zero = zeros.index(step * 2 + u).load(gl.SliceLayout(2, gl.SliceLayout(4, words)))
            zero = gl.expand_dims(gl.expand_dims(zero, 2), 4)
        else:
            zero = gl.zeros([WARPS, 1, 1, 1, 1], gl.int16, layout=words)
        zero = (zero + ADDED).to(gl.bfloat16)
        part = gl.zeros([WARPS, 16, 8], gl.float32, layout=mma)
        for i in gl.static_range(2):
            part = plus_product(part, less(numbers[i], zero), kept[step].index(2 * u + i), words, WARPS)
        scale = scales.index(step * 2 + u).load(gl.SliceLayout(2, mma))
        acc += part * gl.expand_dims(scale.to(gl.float32), 2)
    return acc


@gluon.jit
def hopper_int4_row_kernel(
    x_ptr,  # [K] bf16
    weight_ptr,  # [N, K // 4] int16
    scales_ptr,  # [K // 128, N], of 16 bits
    zeros_ptr,  # [K // 128, N] int16
    bias_ptr,  # [N]
    residual_ptr,  # [N], or [N // 2] with a gate
    out_ptr,  # as the residual
    N: gl.constexpr,  # a multiple of 16
    K: gl.constexpr,  # a multiple of 256
    ZEROS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GATED: gl.constexpr,
    AHEAD: gl.constexpr,  # steps with weights under way
    WARPS: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = steps_of(K, WARPS)
    GROUPS: gl.constexpr = _constants_of(K, WARPS)
    words: gl.constexpr = words_of(WARPS)
    copies: gl.constexpr = whole_lines(WARPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    ring = ()  # buffers of their own: Triton would put barriers between accesses to parts of one
    for _ in gl.static_range(AHEAD):
        ring += (gl.allocate_shared_memory(gl.int16, [WARPS, 2, 2, 8, 32], in_order(5)),)
    scales = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [GROUPS, 2, 8], in_order(3))
    _ask_for_constants(scales, scales_ptr, N, K, GATED, WARPS)
    by_half = scales
    if ZEROS:
        zeros = gl.allocate_shared_memory(gl.int16, [GROUPS, 2, 8], in_order(3))
        _ask_for_constants(zeros, zeros_ptr, N, K, GATED, WARPS)
        by_half = seen_as(zeros, [GROUPS // WARPS, WARPS, 2, 8], in_order(3))
    row = row_of(count(copies, 5, 1, 2), count(copies, 5, 3, 8), gl.program_id(0), N, GATED)
    weights_at = weight_ptr + row * (K // 4)
    weights_at += count(copies, 5, 0, WARPS) * 64 + count(copies, 5, 2, 2) * 32 + count(copies, 5, 4, 32)
    for step in gl.static_range(AHEAD):
        _ask_for_weights(ring[step], weights_at, step, copies, K, WARPS)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    kept = _kept_x(x_ptr, K, WARPS)
    by_row = seen_as(scales, [GROUPS // WARPS, WARPS, 16], in_order(2))
    acc = gl.zeros([WARPS, 16, 8], gl.float32, layout=mma)
    for step in gl.static_range(STEPS):
        async_copy.wait_group(min(AHEAD - 1, STEPS - 1 - step))
        word = ring[step % AHEAD].load(words)
        if step + AHEAD < STEPS:
            _ask_for_weights(ring[step % AHEAD], weights_at, step + AHEAD, copies, K, WARPS)
        acc = _plus_step(acc, word, by_row, by_half, step, kept, words, K, ZEROS, WARPS)

    out = added_up(acc, WARPS)
    halves: gl.constexpr = out.type.layout
    if BIAS:
        bias = gl.load(bias_ptr + row_of(count(halves, 3, 0, 2), count(halves, 3, 1, 8), gl.program_id(0), N, GATED))
        out += bias.to(gl.float32)
    if GATED:
        gate, value = gl.split(gl.permute(out, (1, 2, 0)))
        out = gate / (1.0 + gl.exp(-gate)) * value
        single: gl.constexpr = out.type.layout
        at = gl.program_id(0) * 8 + count(single, 2, 0, 8)
        inside = count(single, 2, 1, 8) == 0  # all columns are the same
    else:
        at = gl.program_id(0) * 16 + count(halves, 3, 0, 2) * 8 + count(halves, 3, 1, 8)
        inside = count(halves, 3, 2, 8) == 0
    at, inside = at.broadcast_to(out.type.shape), inside.broadcast_to(out.type.shape)
    if RESIDUAL:
        out += gl.load(residual_ptr + at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


_kernel = GluonKernel(
    hopper_int4_row_kernel,
    "(Tensor x, Tensor weight, Tensor scales, Tensor zeros, Tensor bias, Tensor residual, Tensor(a!) out) -> ()",
    warps=4,
    early=True,
)


def int4_row(site: CallSite) -> bool:
    """Whether the kernel of this file serves a site."""
    return site.rows("x_TI") == 1 and reads_int4(site)


def int4_row_configs(site: CallSite) -> list[Config]:
    """Launch constants, the likely best first."""
    found: list[Config] = []
    for warps, ahead, registers in _CONFIGS:
        steps = steps_of.fn(site.args["x_TI"].shape[1], warps)
        config = {"warps": warps, "ahead": min(ahead, steps), "registers": registers}
        if config not in found:
            found.append(config)
    return found


def launch_int4_row(
    x_TI: Tensor, matrix: Matrix, out_TN: Tensor, config: Config, residual_TN: Tensor | None = None, gated: bool = False
) -> None:
    """Products of one row of x with the weights into ``out_TN`` [1, N], of any float dtype."""
    weight_OI, bias_O, scales_GO, zeros_GO = matrix[:4]
    N, K, warps = weight_OI.shape[0], x_TI.shape[1], config["warps"]
    options = {"maxnreg": config["registers"]} if config["registers"] else {}
    others = (x_TI if t is None else t for t in (bias_O, residual_TN))
    _kernel(
        N // ROWS_AT_ONCE, x_TI, weight_OI, scales_GO, weight_OI if zeros_GO is None else zeros_GO, *others, out_TN,
        N=N, K=K, ZEROS=zeros_GO is not None, BIAS=bias_O is not None, RESIDUAL=residual_TN is not None, GATED=gated,
        AHEAD=config["ahead"], WARPS=warps, num_warps=warps, **options,
    )  # fmt: skip


@fused_linear.impl("gluon_int4_row", device="cuda", supports=int4_row, configs=int4_row_configs)
def gluon_int4_row(
    x_TI: Tensor, matrix: Matrix, before: Norm | None, residual_TN: Tensor | None, gated: bool, **config: int
) -> Tensor:
    """Sums, bias, gate and residual in float32, then rounded."""
    out_TN = x_TI.new_empty((x_TI.shape[0], matrix.width(gated)))
    launch_int4_row(normalized(x_TI, before), matrix, out_TN, config, residual_TN, gated)
    return out_TN
