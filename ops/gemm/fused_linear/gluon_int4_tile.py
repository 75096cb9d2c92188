"""Products of some rows of x with int4 weights in groups of 128, on Hopper in Gluon: a warp brings codes, their scales
and zero points, and tiles of x into shared memory stages ahead; one group of four warps or two make numbers of the
codes in registers and multiply.

Codes are the left operand, so they become numbers where the tensor cores of a group of warps read them. While one
group decodes, the other's products are under way. With a gate, sixteen rows of a product are eight of the gate and
eight of the value, so that a thread has both of an output. Programs stay, and take one tile after another.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphllm.ir import CallSite, GluonKernel
from graphllm.ops.gemm.fused_linear.gluon_int4 import ADDED, GROUP, SPAN, decoded, less, reads_int4, seen_as
from graphllm.ops.gemm.fused_linear.launch_constants import SHARED, Config
from graphllm.ops.gemm.fused_linear.op import fused_linear
from graphllm.ops.gemm.fused_linear.triton_fused_linear import normalized
from graphllm.ops.gemm.linear.operands import Matrix, Norm

_FEWEST_ROWS, _MOST_ROWS = 9, 64
_BOX = gl.constexpr(64)  # rows of weights that a group of warps multiplies at once
_TILES = ((2, 2), (2, 1), (1, 1))  # groups of warps of a program, and boxes of each
_SPLITS = (1, 2, 4, 7, 8)
_BUSY = 0.3  # of the multiprocessors that have work over the time of a launch, at least
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6


@gluon.jit
def _load_codes(weights, box, k, arrived, to, GATED: gl.constexpr):
    """Ask for the k-th span of 64 rows of weights."""
    layout: gl.constexpr = weights.layout
    if GATED:
        to = seen_as(to, [4, 2, 8, 64], layout)
        _load_tile(weights, [box * 4, 0, 0, k * 64], arrived, to)
    else:
        _load_tile(weights, [box * _BOX, k * 64], arrived, to)


@gluon.jit
def _load_constants(constants, box, k, arrived, to, GATED: gl.constexpr):
    """Ask for that span's scales, or zero points: of two groups."""
    layout: gl.constexpr = constants.layout
    if GATED:
        to = seen_as(to, [2, 4, 2, 8], layout)
        _load_tile(constants, [k * 2, box * 4, 0, 0], arrived, to)
    else:
        _load_tile(constants, [k * 2, box * _BOX], arrived, seen_as(to, [2, 64], layout))


@gluon.jit
def _bring_weights(
    weights, scales, zeros, w_smem, s_smem, z_smem, arrived, tile, k, stage,
    BOXES: gl.constexpr, BLOCK_T: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Ask for a tile's k-th span of weights, and say what a stage has when x is there too."""
    mbarrier.expect(arrived, BOXES * (_BOX * 128 + (2 if ZEROS else 1) * 4 * _BOX) + 4 * BLOCK_T * 128)
    for b in gl.static_range(BOXES):
        box, of = tile * BOXES + b, stage * BOXES + b
        _load_codes(weights, box, k, arrived, w_smem.index(of), GATED)
        _load_constants(scales, box, k, arrived, s_smem.index(of), GATED)
        if ZEROS:
            _load_constants(zeros, box, k, arrived, z_smem.index(of), GATED)


@gluon.jit
def _bring_tiles(
    weights, scales, zeros, rows, w_smem, s_smem, z_smem, x_smem, full, free,
    COUNT: gl.constexpr, SPLITS: gl.constexpr, STEPS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_T: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room. The first stages' weights are asked
    for before it waits for x."""
    EARLY: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    first = gl.program_id(0) % SPLITS * STEPS
    for stage in range(EARLY):
        _bring_weights(
            weights, scales, zeros, w_smem, s_smem, z_smem, full.index(stage), gl.program_id(0) // SPLITS,
            first + stage, stage, BOXES, BLOCK_T, ZEROS, GATED,
        )  # fmt: skip
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    n = 0
    for i in range(gl.program_id(0), COUNT * SPLITS, gl.num_programs(0)):
        first = i % SPLITS * STEPS
        for k in range(first, first + STEPS):
            stage = n % STAGES
            arrived = full.index(stage)
            mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
            if n >= EARLY:
                _bring_weights(
                    weights, scales, zeros, w_smem, s_smem, z_smem, arrived, i // SPLITS, k, stage, BOXES, BLOCK_T,
                    ZEROS, GATED,
                )  # fmt: skip
            for j in gl.static_range(4):
                _load_tile(rows, [0, k * SPAN + j * 64], arrived, x_smem.index(stage * 4 + j))
            n += 1


@gluon.jit
def _zeros_of(zeros, u, ZEROS: gl.constexpr, layout: gl.constexpr):
    """[rows, 1] bf16: what is too much of a group's codes."""
    if ZEROS:
        zero = zeros.index(u).load(gl.SliceLayout(1, layout))
    else:
        zero = gl.zeros([_BOX], gl.int16, layout=gl.SliceLayout(1, layout))
    return gl.expand_dims((zero + ADDED).to(gl.bfloat16), 1)


@gluon.jit
def _plus_span(
    acc, w_smem, s_smem, z_smem, x_smem, of, stage, ZEROS: gl.constexpr, BLOCK_T: gl.constexpr, mma: gl.constexpr
):  # fmt: skip
    """acc + a span of a box of weights times that of x. Codes of its second group become numbers while the products of
    the first one are under way."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    words = w_smem.index(of).load(layout)
    scales = seen_as(s_smem.index(of), [2, _BOX], flat)
    zeros = seen_as(z_smem.index(of), [2, _BOX], flat) if ZEROS else scales
    begun = ()
    for u in gl.static_range(2):
        numbers = decoded(words, u)
        zero = _zeros_of(zeros, u, ZEROS, layout)
        first, second = less(numbers[0], zero), less(numbers[1], zero)
        x = x_smem.index(stage * 4 + 2 * u).permute((1, 0))
        next_x = x_smem.index(stage * 4 + 2 * u + 1).permute((1, 0))
        part = gl.zeros([_BOX, BLOCK_T], gl.float32, layout=mma)
        part = hopper.warpgroup_mma(first, x, part, use_acc=False, is_async=True)
        part = hopper.warpgroup_mma(second, next_x, part, is_async=True)
        begun += ((part, first, second),)
    for u in gl.static_range(2):
        scale = scales.index(u).load(gl.SliceLayout(1, mma)).to(gl.float32)
        part, first, second = begun[u]
        part, first, second = hopper.warpgroup_mma_wait(2 - 2 * u, deps=[part, first, second])
        acc += part * gl.expand_dims(scale, 1)
    return acc


@gluon.jit
def _write(
    acc, box, split, bias_ptr, out_ptr, T,
    N: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, BLOCK_T: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """A box's numbers of all tokens."""
    WIDTH: gl.constexpr = N // 2 if GATED else N
    WRITTEN: gl.constexpr = 32 if GATED else 64
    if BIAS:
        row = gl.arange(0, _BOX, layout=gl.SliceLayout(1, mma))
        column = box * 32 + row // 16 * 8 + row % 8 + row // 8 % 2 * WIDTH if GATED else box * _BOX + row
        inside = column < N
        acc += gl.expand_dims(gl.load(bias_ptr + column, mask=inside, other=0.0).to(gl.float32), 1)
    if GATED:
        gate, value = gl.split(gl.permute(gl.reshape(acc, [4, 2, 8, BLOCK_T]), (0, 2, 3, 1)))
        acc = gl.reshape(gate / (1.0 + gl.exp(-gate)) * value, [32, BLOCK_T])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WRITTEN, WRITTEN // 4], [4, 1], [1, 0])
    out = gl.convert_layout(gl.permute(acc, (1, 0)).to(out_ptr.dtype.element_ty), wide)
    token = gl.expand_dims(gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, wide)), 1)
    column = gl.expand_dims(box * WRITTEN + gl.arange(0, WRITTEN, layout=gl.SliceLayout(0, wide)), 0)
    gl.store(out_ptr + (split * T + token) * WIDTH + column, out, mask=(token < T) & (column < WIDTH))


@gluon.jit
def _multiply(
    w_smem, s_smem, z_smem, x_smem, full, free, bias_ptr, out_ptr, T,
    N: gl.constexpr, COUNT: gl.constexpr, SPLITS: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr,
    BOXES: gl.constexpr, STAGES: gl.constexpr, BLOCK_T: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """What the OWN-th group of four warps does: its boxes of each tile."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    OF: gl.constexpr = GROUPS * BOXES
    # In this order: descriptors lie in memory that every other such kernel writes, see `gluon_product`.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    n = 0
    for i in range(gl.program_id(0), COUNT * SPLITS, gl.num_programs(0)):
        acc = gl.zeros([_BOX, BLOCK_T], gl.float32, layout=mma)
        other = gl.zeros([_BOX, BLOCK_T], gl.float32, layout=mma)
        for _ in range(STEPS):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            of = stage * OF + OWN * BOXES
            acc = _plus_span(acc, w_smem, s_smem, z_smem, x_smem, of, stage, ZEROS, BLOCK_T, mma)
            if BOXES == 2:
                other = _plus_span(other, w_smem, s_smem, z_smem, x_smem, of + 1, stage, ZEROS, BLOCK_T, mma)
            mbarrier.arrive(free.index(stage), count=1)
            n += 1
        box = i // SPLITS * OF + OWN * BOXES
        _write(acc, box, i % SPLITS, bias_ptr, out_ptr, T, N, BIAS, GATED, BLOCK_T, mma)
        if BOXES == 2:
            _write(other, box + 1, i % SPLITS, bias_ptr, out_ptr, T, N, BIAS, GATED, BLOCK_T, mma)


@gluon.jit
def hopper_int4_tile_kernel(
    x_ptr,  # [T, K] bf16
    weight_ptr,  # [N, K // 4] int16
    scales_ptr,  # [K // 128, N], of 16 bits
    zeros_ptr,  # [K // 128, N] int16
    bias_ptr,  # [N]
    out_ptr,  # [T, N], [T, N // 2] with a gate, or parts of sums [SPLITS, T, N]
    T,  # at most BLOCK_T
    X_ROW: gl.constexpr,
    N: gl.constexpr,  # a multiple of 16
    K: gl.constexpr,  # a multiple of 256
    ZEROS: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    GROUPS: gl.constexpr,  # of four warps that multiply: 1 or 2
    BOXES: gl.constexpr,  # of 64 rows of weights that each of them has: 1 or 2
    SPLITS: gl.constexpr,  # of the inner dimension
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WORDS: gl.constexpr = K // 4
    OF: gl.constexpr = GROUPS * BOXES
    COUNT: gl.constexpr = (N + _BOX * OF - 1) // (_BOX * OF)
    STEPS: gl.constexpr = K // SPAN // SPLITS
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    plain: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=4 if GATED else 2)
    if GATED:
        deep: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        weights = tma.make_tensor_descriptor(
            weight_ptr, [N // 16, 2, 8, WORDS], [8 * WORDS, N // 2 * WORDS, WORDS, 1], [4, 2, 8, 64], deep
        )
        scales = tma.make_tensor_descriptor(
            scales_ptr, [K // GROUP, N // 16, 2, 8], [N, 8, N // 2, 1], [2, 4, 2, 8], plain
        )
        zeros = tma.make_tensor_descriptor(
            zeros_ptr, [K // GROUP, N // 16, 2, 8], [N, 8, N // 2, 1], [2, 4, 2, 8], plain
        )
    else:
        weights = tma.make_tensor_descriptor(weight_ptr, [N, WORDS], [WORDS, 1], [64, 64], swizzled)
        scales = tma.make_tensor_descriptor(scales_ptr, [K // GROUP, N], [N, 1], [2, 64], plain)
        zeros = tma.make_tensor_descriptor(zeros_ptr, [K // GROUP, N], [N, 1], [2, 64], plain)
    rows = tma.make_tensor_descriptor(x_ptr, [T, K], [X_ROW, 1], [BLOCK_T, 64], swizzled)
    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES * OF, _BOX, 64], swizzled)
    s_smem = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [STAGES * OF, 2 * _BOX], flat)
    z_smem = gl.allocate_shared_memory(gl.int16, [STAGES * OF, 2 * _BOX], flat)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, BLOCK_T, 64], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    hopper.fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    w_smem, s_smem, z_smem, x_smem, full, free, bias_ptr, out_ptr, T, N, COUNT, SPLITS, STEPS,
                    GROUPS, BOXES, STAGES, BLOCK_T, ZEROS, BIAS, GATED, 0,
                )),
                (_multiply, (
                    w_smem, s_smem, z_smem, x_smem, full, free, bias_ptr, out_ptr, T, N, COUNT, SPLITS, STEPS,
                    GROUPS, BOXES, STAGES, BLOCK_T, ZEROS, BIAS, GATED, 1,
                )),
                (_bring_tiles, (
                    weights, scales, zeros, rows, w_smem, s_smem, z_smem, x_smem, full, free, COUNT, SPLITS, STEPS, OF,
                    STAGES, BLOCK_T, ZEROS, GATED,
                )),
            ],
            [4, 1],  # warps of the second group and of what fills shared memory
            [240, 24],  # registers of their threads; the first group has as many as the second one
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    w_smem, s_smem, z_smem, x_smem, full, free, bias_ptr, out_ptr, T, N, COUNT, SPLITS, STEPS,
                    GROUPS, BOXES, STAGES, BLOCK_T, ZEROS, BIAS, GATED, 0,
                )),
                (_bring_tiles, (
                    weights, scales, zeros, rows, w_smem, s_smem, z_smem, x_smem, full, free, COUNT, SPLITS, STEPS, OF,
                    STAGES, BLOCK_T, ZEROS, GATED,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip


_kernel = GluonKernel(
    hopper_int4_tile_kernel,
    "(Tensor x, Tensor weight, Tensor scales, Tensor zeros, Tensor bias, Tensor(a!) out, SymInt T) -> ()",
    warps=4,
    early=True,
)


def int4_tile(site: CallSite) -> bool:
    """Whether the kernel of this file serves a site."""
    return _FEWEST_ROWS <= site.rows("x_TI") <= _MOST_ROWS and reads_int4(site)


def int4_tile_configs(site: CallSite, splits: bool) -> list[Config]:
    """Launch constants, the likely best first. splits: whether the inner dimension may be divided."""
    (N, K), processors = (site.args["weight_OI"].shape[0], site.args["x_TI"].shape[1]), site.target.multiprocessors
    block_t = max(16, 1 << (site.rows("x_TI") - 1).bit_length())
    found: list[tuple[float, Config]] = []
    for groups, boxes in _TILES:
        tiles = -(-N // (_BOX.value * groups * boxes))
        possible = [n for n in (_SPLITS if splits else (1,)) if K // SPAN.value % n == 0]
        parts = max((n for n in possible if n * tiles <= processors), default=1)
        size = groups * boxes * (_BOX.value * 128 + 8 * _BOX.value) + 4 * block_t * 128
        written = groups * _BOX.value * block_t * 2  # bytes by which rows of the output are put together
        config = {
            "groups": groups, "boxes": boxes, "splits": parts, "block_t": block_t,
            "stages": min(8, (SHARED - 1024 - written) // size), "programs": min(tiles * parts, processors),
        }  # fmt: skip
        found.append((tiles * parts / (-(-tiles * parts // processors) * processors), config))
    return [config for busy, config in found if busy >= _BUSY] or [found[-1][1]]


def launch_int4_tile(x_TI: Tensor, matrix: Matrix, out: Tensor, config: Config, gated: bool = False) -> None:
    """Products of x with the weights into ``out`` [T, N], or their parts into [splits, T, O], of any float dtype."""
    weight_OI, bias_O, scales_GO, zeros_GO = matrix[:4]
    (T, K), N = x_TI.shape, weight_OI.shape[0]
    _kernel(
        config["programs"], x_TI, weight_OI, scales_GO, weight_OI if zeros_GO is None else zeros_GO,
        x_TI if bias_O is None else bias_O, out, T, X_ROW=x_TI.stride(0), N=N, K=K, ZEROS=zeros_GO is not None,
        BIAS=bias_O is not None, GATED=gated, GROUPS=config["groups"], BOXES=config["boxes"], SPLITS=config["splits"],
        BLOCK_T=config["block_t"], STAGES=config["stages"],
    )  # fmt: skip


@fused_linear.impl(
    "gluon_int4_tile",
    device="cuda",
    supports=lambda site: int4_tile(site) and site.args["residual_TN"] is None,
    configs=lambda site: int4_tile_configs(site, splits=False),
)
def gluon_int4_tile(x_TI: Tensor, matrix: Matrix, before: Norm | None, gated: bool, **config: Any) -> Tensor:
    """Sums, bias and gate in float32, then rounded."""
    out_TN = x_TI.new_empty((x_TI.shape[0], matrix.width(gated)))
    launch_int4_tile(normalized(x_TI, before), matrix, out_TN, config, gated)
    return out_TN
