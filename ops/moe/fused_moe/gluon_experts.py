"""Products of some tokens with experts in four-bit floats on Hopper, in Gluon: a warp brings codes, their scales and
rows of x into shared memory stages ahead, and a team of four warps, or two that share the spans of a stage and add
their sums, make numbers of the codes in registers and multiply.

What limits these products in addition to the bytes are the bits to move (three instructions for two codes and one that
scales them), and how memory is read: 128 neighbouring bytes of a row at a time take a sixth less time than 64, so a
stage has two spans of codes or more. Nothing is gained by the tensor cores of a group of warps: one warp's products, of
eight tokens at a time, keep up, and need no waiting.

Programs stay, and take one tile after another: HALF rows of a matrix and as many others, of one expert. Pairs of a
token and an expert lie in the order of experts, so that the rows of an expert's tokens are neighbours, which the TMA
unit reads; what it reads after them only makes columns that nobody writes.
"""

# mypy: allow-untyped-defs
# ruff: noqa: RUF005  (Gluon's tuples are joined by +)

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma

from graphllm.ir import GluonKernel
from graphllm.ops.gemm.fused_linear.gluon_int4 import seen_as

_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6


@triton.constexpr_function
def _decoding():
    """PTX: of a pair of int16, $4, four pairs of bf16 numbers: the bits of the j-th codes in their places, by two
    copies in one product, times the factor that both halves of $(5 + 2 * j) are."""
    lines = []
    for j in range(4):
        code, at = ("s", j - 2) if j >= 2 else ("$4", j)
        mask = 0xF << 4 * at
        lines += ["shr.b32 s, $4, 8;"] * (j == 2) + [
            f"and.b32 t, {code}, 0x{mask:04x}{mask:04x};",
            f"mul.lo.u32 t, t, {(1 << 6 | 1 << 12) >> 4 * at};",
            "and.b32 t, t, 0x81c081c0;",
            f"mul.rn.bf16x2 ${j}, t, ${5 + 2 * j};",
        ]
    return "{ .reg .b32 t, s; " + " ".join(lines) + " }"


@gluon.jit
def decoded(words, factors):
    """The four numbers of every int16, times the factors of their rows."""
    return gl.inline_asm_elementwise(
        _decoding(), "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [words, factors[0], factors[1], factors[2], factors[3]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _factors(scales, G: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr):
    """Of a span's four groups [HALF, 1] int32: each row's factor in bf16, twice. It takes the 2 ** 126 by which bits in
    their places are too small, and leaves 2 ** -63, so that scales up to 2 ** 64 fit."""
    factors = ()
    for j in gl.static_range(4):
        exponents = scales.slice((G * 4 + j) * HALF, HALF).load(gl.SliceLayout(1, layout)).to(gl.int32)
        factors = factors + ((exponents * 0x00800080 + 0x1F801F80).expand_dims(1),)  # type: ignore[assignment]
    return factors


@gluon.jit
def _bring_tiles(
    weights, scales, rows, w_smem, s_smem, x_smem, full, free, table_ptr,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, N: gl.constexpr, OTHER: gl.constexpr, STEP: gl.constexpr,
    BLOCKS: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, SPANS: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room."""
    BOXES: gl.constexpr = SPANS // 2
    layout: gl.constexpr = scales.layout
    n = 0
    for i in range(gl.program_id(0), N * BLOCKS, gl.num_programs(0)):
        expert = i // BLOCKS
        first = i % BLOCKS * STEP
        begin = gl.load(table_ptr + 2 * expert)
        count = gl.load(table_ptr + 2 * expert + 1)
        for s in range(0, count, SLOTS):
            for tile in range(TILES):
                stage = n % STAGES
                mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
                arrived = full.index(stage)
                mbarrier.expect(arrived, SPANS * (PARTS * HALF * (64 + 4) + SLOTS * 256))
                for p in gl.static_range(PARTS):
                    row = p * OTHER + first
                    for b in gl.static_range(BOXES):
                        to = w_smem.index((stage * PARTS + p) * BOXES + b)
                        _load_tile(weights, [expert * ROWS + row, (tile * BOXES + b) * 64], arrived, to)
                    to = seen_as(s_smem.index(stage * PARTS + p), [4 * SPANS, HALF], layout)
                    _load_tile(scales, [expert * GROUPS + tile * (4 * SPANS), row], arrived, to)
                for j in gl.static_range(4 * SPANS):
                    at = tile * (4 * SPANS) + j
                    _load_tile(rows, [begin + s, at * 32], arrived, x_smem.index(stage * (4 * SPANS) + j))
                n += 1


@gluon.jit
def _multiply_span(
    acc, w_smem, s_smem, x_smem, stage, P: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
    SPANS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """acc + a stage's G-th span of a part's rows times that of x."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    of = stage * PARTS + P
    words = w_smem.index(of * (SPANS // 2) + G // 2).slice(G % 2 * 32, 32, dim=1).load(a_layout)
    numbers = decoded(words, _factors(s_smem.index(of), G, HALF, a_layout))
    for j in gl.static_range(4):
        x = x_smem.index((stage * SPANS + G) * 4 + j).permute((1, 0)).load(b_layout)
        acc = mma_v2(numbers[j], x, acc)
    return acc


@gluon.jit
def before_sigmoid(gate, up, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr):
    """The factors of `triton_common.activated`: gate * sigmoid(the last one) * up."""
    if ACTIVATION == "clamped":
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT) + 1.0
        scaled = 1.702 * gate
    elif ACTIVATION == "gelu_tanh":
        scaled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        scaled = gate
    return gate, up, scaled


@gluon.jit
def activated(gate, up, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr):
    """As `triton_common.activated`."""
    gate, up, scaled = before_sigmoid(gate, up, ACTIVATION, LIMIT)
    return gate / (1.0 + gl.exp(-scaled)) * up


@gluon.jit
def _write(
    acc, other, expert, first, begin, count, order_ptr, bias_ptr, weights_ptr, out_ptr,
    ROWS: gl.constexpr, OTHER: gl.constexpr, WIDTH: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """A tile's columns of ``count`` of the slots; the first slot has the place ``begin``."""
    column = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, mma))
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, mma))
    there = slot < count
    inside = column < WIDTH
    acc = acc * 9223372036854775808.0  # 2 ** 63
    other = other * 9223372036854775808.0
    if BIAS:
        bias = bias_ptr + expert * ROWS + column
        acc += gl.load(bias, mask=inside, other=0.0).to(gl.float32).expand_dims(1)
        if PARTS == 2:
            other += gl.load(bias + OTHER, mask=column + OTHER < ROWS, other=0.0).to(gl.float32).expand_dims(1)
    if GATED:
        out = activated(acc, other, ACTIVATION, LIMIT)
        to = out_ptr + ((begin + slot) * WIDTH).expand_dims(0) + column.expand_dims(1)
        gl.store(to, out.to(out_ptr.dtype.element_ty), mask=there.expand_dims(0) & inside.expand_dims(1))
    else:
        pair = gl.load(order_ptr + begin + slot, mask=there, other=0)
        weight = gl.load(weights_ptr + pair, mask=there, other=0.0).expand_dims(0)
        to = out_ptr + (pair * WIDTH).expand_dims(0) + column.expand_dims(1)
        gl.store(to, (acc * weight).to(out_ptr.dtype.element_ty), mask=there.expand_dims(0) & inside.expand_dims(1))
        if PARTS == 2:
            inside = column + OTHER < WIDTH
            out = (other * weight).to(out_ptr.dtype.element_ty)
            gl.store(to + OTHER, out, mask=there.expand_dims(0) & inside.expand_dims(1))


@gluon.jit
def _summed(acc, other, sums, given, taken, n, TEAM: gl.constexpr, PARTS: gl.constexpr, mma: gl.constexpr):
    """The n-th tile's sums of both teams, for the first one; the second one gives its own."""
    if TEAM == 1:
        mbarrier.wait(taken, (n & 1) ^ 1)
        sums.index(0).store(acc)
        if PARTS == 2:
            sums.index(1).store(other)
        mbarrier.arrive(given, count=1)
    else:
        mbarrier.wait(given, n & 1)
        acc += sums.index(0).load(mma)
        if PARTS == 2:
            other += sums.index(1).load(mma)
        mbarrier.arrive(taken, count=1)
    return acc, other


@gluon.jit
def _multiply(
    TEAM: gl.constexpr, w_smem, s_smem, x_smem, sums, full, free, given, taken, table_ptr, order_ptr, bias_ptr,
    weights_ptr, out_ptr,
    ROWS: gl.constexpr, N: gl.constexpr, OTHER: gl.constexpr, STEP: gl.constexpr, BLOCKS: gl.constexpr,
    WIDTH: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, SPANS: gl.constexpr, TEAMS: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """What a team of four warps does: its spans of each stage."""
    n = 0
    for i in range(gl.program_id(0), N * BLOCKS, gl.num_programs(0)):
        expert = i // BLOCKS
        first = i % BLOCKS * STEP
        begin = gl.load(table_ptr + 2 * expert)
        count = gl.load(table_ptr + 2 * expert + 1)
        for s in range(0, count, SLOTS):
            acc = gl.zeros([HALF, SLOTS], gl.float32, layout=mma)
            other = gl.zeros([HALF, SLOTS], gl.float32, layout=mma)
            for _ in range(TILES):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                for G in gl.static_range(TEAM, SPANS, TEAMS):
                    acc = _multiply_span(acc, w_smem, s_smem, x_smem, stage, 0, G, HALF, PARTS, SPANS, mma)
                    if PARTS == 2:
                        other = _multiply_span(other, w_smem, s_smem, x_smem, stage, 1, G, HALF, PARTS, SPANS, mma)
                mbarrier.arrive(free.index(stage), count=1)
                n += 1
            if TEAMS == 2:
                acc, other = _summed(acc, other, sums, given, taken, n // TILES - 1, TEAM, PARTS, mma)
            if TEAM == 0:
                _write(
                    acc, other, expert, first, begin + s, count - s, order_ptr, bias_ptr, weights_ptr, out_ptr, ROWS,
                    OTHER, WIDTH, HALF, PARTS, SLOTS, BIAS, GATED, ACTIVATION, LIMIT, mma,
                )  # fmt: skip


@gluon.jit
def hopper_experts_kernel(
    x_ptr,  # [P + SLOTS, K] in the order of experts
    weight_ptr,  # [N, ROWS, WEIGHT_ROW] int16
    scales_ptr,  # [N, K / 32, ROWS] uint8
    bias_ptr,  # [N, ROWS]
    weights_ptr,  # [P] float32, by pair
    table_ptr,  # [N, 2] int32: of each expert its first place, and its pairs
    order_ptr,  # [P] int32: pairs by place
    out_ptr,  # [P + SLOTS, ROWS / 2] in the order of experts, or [P, ROWS] by pair
    WEIGHT_ROW: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, N: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr,  # the first of the two products: with an activation; else weighted
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr,
    SLOTS: gl.constexpr,  # tokens of an expert that are multiplied at a time
    PARTS: gl.constexpr,  # blocks of rows: of the gate and of up, or neighbours
    STAGES: gl.constexpr,
    SPANS: gl.constexpr,  # of a stage, an even number
    TEAMS: gl.constexpr,  # of four warps that multiply: 1, or 2 that share the spans of a stage
    REGISTERS: gl.constexpr,  # of the second team's threads; the first one's have what is left
):  # fmt: skip
    # In this order: see the kernel of `gluon_product`, which writes descriptors before it waits.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    WARPS: gl.constexpr = 4
    HALF: gl.constexpr = 16 * WARPS
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    OTHER: gl.constexpr = ROWS // 2 if GATED else HALF
    STEP: gl.constexpr = HALF if GATED else HALF * PARTS
    BLOCKS: gl.constexpr = (WIDTH + STEP - 1) // STEP
    TILES: gl.constexpr = (K + 128 * SPANS - 1) // (128 * SPANS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    w_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    s_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    weights = tma.make_tensor_descriptor(weight_ptr, [N * ROWS, WEIGHT_ROW], [WEIGHT_ROW, 1], [HALF, 64], w_layout)
    scales = tma.make_tensor_descriptor(scales_ptr, [N * (K // 32), ROWS], [ROWS, 1], [4 * SPANS, HALF], s_layout)
    rows = tma.make_tensor_descriptor(x_ptr, [2147483647, K], [K, 1], [SLOTS, 32], x_layout)
    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES * PARTS * (SPANS // 2), HALF, 64], w_layout)
    s_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * PARTS, SPANS * 4 * HALF], flat)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * SPANS * 4, SLOTS, 32], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    given = gl.allocate_shared_memory(gl.int64, [1], one)
    taken = gl.allocate_shared_memory(gl.int64, [1], one)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=TEAMS)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=1)
    hopper.fence_async_shared()
    if TEAMS == 2:
        row_major: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [PARTS, HALF, SLOTS], row_major)
        gl.warp_specialize(
            [
                (_multiply, (
                    0, w_smem, s_smem, x_smem, sums, full, free, given, taken, table_ptr, order_ptr, bias_ptr,
                    weights_ptr, out_ptr, ROWS, N, OTHER, STEP, BLOCKS, WIDTH, TILES, SLOTS, HALF, PARTS, STAGES, SPANS,
                    TEAMS, BIAS, GATED, ACTIVATION, LIMIT, mma,
                )),
                (_multiply, (
                    1, w_smem, s_smem, x_smem, sums, full, free, given, taken, table_ptr, order_ptr, bias_ptr,
                    weights_ptr, out_ptr, ROWS, N, OTHER, STEP, BLOCKS, WIDTH, TILES, SLOTS, HALF, PARTS, STAGES, SPANS,
                    TEAMS, BIAS, GATED, ACTIVATION, LIMIT, mma,
                )),
                (_bring_tiles, (
                    weights, scales, rows, w_smem, s_smem, x_smem, full, free, table_ptr, ROWS, K // 32, N, OTHER, STEP,
                    BLOCKS, TILES, SLOTS, HALF, PARTS, STAGES, SPANS,
                )),
            ],
            [4, 1],  # warps of the second team and of what fills shared memory
            [REGISTERS, 24],  # registers of their threads; the first team's have what is left
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, w_smem, s_smem, x_smem, x_smem, full, free, given, taken, table_ptr, order_ptr, bias_ptr,
                    weights_ptr, out_ptr, ROWS, N, OTHER, STEP, BLOCKS, WIDTH, TILES, SLOTS, HALF, PARTS, STAGES, SPANS,
                    TEAMS, BIAS, GATED, ACTIVATION, LIMIT, mma,
                )),
                (_bring_tiles, (
                    weights, scales, rows, w_smem, s_smem, x_smem, full, free, table_ptr, ROWS, K // 32, N, OTHER, STEP,
                    BLOCKS, TILES, SLOTS, HALF, PARTS, STAGES, SPANS,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip


hopper_experts = GluonKernel(
    hopper_experts_kernel,
    "(Tensor x, Tensor weight, Tensor scales, Tensor bias, Tensor weights, Tensor table, Tensor order, Tensor(a!) out)"
    " -> ()",
    warps=4,
    early=True,
)
