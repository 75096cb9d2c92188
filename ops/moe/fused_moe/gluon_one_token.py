"""fused_moe on Hopper for one token and experts in four-bit floats with powers of two for 32, in Gluon: all of a
program's weights are asked for at once, by asynchronous copies to shared memory.

The second product knows its experts, and asks for their weights, while the first one still runs: that lets it begin
only when what has chosen the experts is over.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphllm.ir import CallSite, GluonKernel
from graphllm.ops.gemm.fused_linear.gluon_int4 import seen_as
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
from graphllm.ops.moe.fused_moe.gluon_experts import activated, decoded
from graphllm.ops.moe.fused_moe.gluon_tokens import reads_experts
from graphllm.ops.moe.fused_moe.op import fused_moe
from graphllm.ops.moe.fused_moe.operands import Experts, Residual, Route
from graphllm.ops.moe.fused_moe.triton_common import added

_WARPS = (4, 8, 2)


@triton.constexpr_function
def _power_of_2(n):
    return 1 << (n - 1).bit_length()


@gluon.jit
def _ask_for_scales(into, scales_at, block, ROWS: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr,
                    PLACES: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """All scales of a program's rows, [PLACES, 2, 2, 8]: by step, code of an int16 and warp; half of rows; span."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [8, 2, 2, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    place = count(layout, 4, 0, PLACES)
    spans = place // (4 * WARPS) * WARPS + place % WARPS
    group = (spans * 2 + count(layout, 4, 2, 2)) * 4 + place // WARPS % 4
    at = group * ROWS + row_of(count(layout, 4, 1, 2), count(layout, 4, 3, 8), block, ROWS, GATED)
    copy(into, scales_at + at, mask=(group < K // 32).broadcast_to([PLACES, 2, 2, 8]))


@gluon.jit
def _ask_for_weights(into, weights_at, step, copies: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """Of two spans of every warp."""
    at = weights_at + step * (WARPS * 64)
    if (step + 1) * WARPS * 256 > K:
        span = (step * WARPS + count(copies, 5, 0, WARPS)) * 2 + count(copies, 5, 2, 2)
        copy(into, at, mask=(span * 128 < K).broadcast_to(at.type.shape), cache_modifier=".cg")
    else:
        copy(into, at, cache_modifier=".cg")
    async_copy.commit_group()


@gluon.jit
def _kept_x(x_ptr, K: gl.constexpr, WARPS: gl.constexpr):
    """x in shared memory, step by step: [codes of an int16, WARPS, spans, 32]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [4, 1, 2, 4], [1, WARPS, 1, 1], [3, 2, 1, 0])
    at = (count(layout, 4, 1, WARPS) * 2 + count(layout, 4, 2, 2)) * 128
    at = (at + count(layout, 4, 0, 4) * 32 + count(layout, 4, 3, 32)).broadcast_to([4, WARPS, 2, 32])
    loaded = ()
    for step in gl.static_range(steps_of(K, WARPS)):
        first = step * (WARPS * 256)
        loaded += (gl.load(x_ptr + first + at, mask=at < K - first, other=0.0),)
    kept = ()
    for step in gl.static_range(steps_of(K, WARPS)):
        buffer = gl.allocate_shared_memory(gl.bfloat16, [4, WARPS, 2, 32], in_order(4), loaded[step])
        kept += (seen_as(buffer, [4, WARPS, 2, 32], in_order(3)),)
    return kept


@gluon.jit
def _plus_step(acc, word, scales, step, kept, words: gl.constexpr, WARPS: gl.constexpr):
    """The sums and what a step adds; 2 ** 63 times less than it is, as `gluon_experts` has it."""
    factors = ()
    for j in gl.static_range(4):
        exponents = scales.index(step * 4 + j).load(gl.SliceLayout(4, words)).to(gl.int32)
        factors += (gl.expand_dims(exponents * 0x00800080 + 0x1F801F80, 4),)
    numbers = decoded(word, factors)
    for j in gl.static_range(4):
        acc = plus_product(acc, numbers[j], kept[step].index(j), words, WARPS)
    return acc


@gluon.jit
def hopper_one_token_kernel(
    x_ptr,  # [K], or of each pair [A, K]
    weight_ptr,  # [N, ROWS, WEIGHT_ROW] int16
    scales_ptr,  # [N, K / 32, ROWS] uint8
    bias_ptr,  # [N, ROWS]
    weights_ptr,  # [A] float32
    experts_ptr,  # [A] int32
    out_ptr,  # [A, ROWS / 2], or [A, ROWS]
    WEIGHT_ROW: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr,  # the first of the two products: with an activation; else weighted
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = steps_of(K, WARPS)
    PLACES: gl.constexpr = _power_of_2(STEPS * 4 * WARPS)
    BLOCKS: gl.constexpr = ROWS // 16
    words: gl.constexpr = words_of(WARPS)
    copies: gl.constexpr = whole_lines(WARPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    if GATED:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    pair = gl.program_id(0) // BLOCKS
    block = gl.program_id(0) % BLOCKS
    chosen = gl.load(experts_ptr + pair)
    expert = gl.maximum(chosen, 0)
    ring = ()
    for _ in gl.static_range(STEPS):
        ring += (gl.allocate_shared_memory(gl.int16, [WARPS, 2, 2, 8, 32], in_order(5)),)
    scales = gl.allocate_shared_memory(gl.uint8, [PLACES, 2, 2, 8], in_order(4))
    _ask_for_scales(scales, scales_ptr + expert * (K // 32 * ROWS), block, ROWS, K, GATED, PLACES, WARPS)
    row = row_of(count(copies, 5, 1, 2), count(copies, 5, 3, 8), block, ROWS, GATED)
    weights_at = weight_ptr + (expert * ROWS).to(gl.int64) * WEIGHT_ROW + row * WEIGHT_ROW
    weights_at += count(copies, 5, 0, WARPS) * 64 + count(copies, 5, 2, 2) * 32 + count(copies, 5, 4, 32)
    for step in gl.static_range(STEPS):
        _ask_for_weights(ring[step], weights_at, step, copies, K, WARPS)
    if not GATED:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    kept = _kept_x(x_ptr if GATED else x_ptr + pair * K, K, WARPS)
    by_code = seen_as(scales, [PLACES // WARPS, WARPS, 2, 2, 8], in_order(4))
    acc = gl.zeros([WARPS, 16, 8], gl.float32, layout=mma)
    for step in gl.static_range(STEPS):
        async_copy.wait_group(STEPS - 1 - step)
        acc = _plus_step(acc, ring[step].load(words), by_code, step, kept, words, WARPS)

    out = added_up(acc, WARPS) * 9223372036854775808.0  # 2 ** 63
    halves: gl.constexpr = out.type.layout
    own = row_of(count(halves, 3, 0, 2), count(halves, 3, 1, 8), block, ROWS, GATED)
    if BIAS:
        out += gl.load(bias_ptr + expert * ROWS + own).to(gl.float32)
    if GATED:
        gate, up = gl.split(gl.permute(out, (1, 2, 0)))
        out = activated(gate, up, ACTIVATION, LIMIT)
        single: gl.constexpr = out.type.layout
        at = pair * (ROWS // 2) + block * 8 + count(single, 2, 0, 8)
        inside = (count(single, 2, 1, 8) == 0) & (chosen >= 0)  # all columns are the same
    else:
        out *= gl.load(weights_ptr + pair)
        at = pair * ROWS + own
        inside = (count(halves, 3, 2, 8) == 0) & (chosen >= 0)
    at, inside = at.broadcast_to(out.type.shape), inside.broadcast_to(out.type.shape)
    gl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


_kernel = GluonKernel(
    hopper_one_token_kernel,
    "(Tensor x, Tensor weight, Tensor scales, Tensor bias, Tensor weights, Tensor experts, Tensor(a!) out) -> ()",
    warps=4,
    early=True,
)


def supports_one_token(site: CallSite) -> bool:
    """Whether weights are what the kernel reads, and tokens one."""
    F, D = site.args["gate_up_N2FD"].shape[1] // 2, site.args["x_TD"].shape[1]
    return site.rows("x_TD") == 1 and reads_experts(site) and F % ROWS_AT_ONCE == 0 and D % ROWS_AT_ONCE == 0


def one_token_configs(site: CallSite) -> list[dict[str, int]]:
    """Launch constants, the likely best first."""
    return [{"warps": warps} for warps in _WARPS]


@fused_moe.impl("gluon_one_token", device="cuda", supports=supports_one_token, configs=one_token_configs)
def gluon_one_token(x_TD: Tensor, experts: Experts, route: Route, residual: Residual | None, *, warps: int) -> Tensor:
    """h and what each expert gives are rounded to x's dtype."""
    weights_TA, experts_TA = route
    A, (_, D, F) = experts_TA.shape[1], experts.sizes
    h_AF, y_AD = x_TD.new_empty((A, F)), x_TD.new_empty((A, D))
    for i, (x, weight, out) in enumerate(zip((x_TD, h_AF), experts.weights, (h_AF, y_AD), strict=True)):
        scales, bias = experts.scales[i], experts.biases[i]
        _kernel(
            A * (weight.shape[1] // ROWS_AT_ONCE), x, weight, scales, x if bias is None else bias, weights_TA,
            experts_TA, out, WEIGHT_ROW=weight.shape[2], ROWS=weight.shape[1], K=x.shape[1], BIAS=bias is not None,
            GATED=i == 0, ACTIVATION=experts.activation, LIMIT=experts.limit, WARPS=warps, num_warps=warps,
        )  # fmt: skip
    return added(y_AD, experts_TA, residual)
