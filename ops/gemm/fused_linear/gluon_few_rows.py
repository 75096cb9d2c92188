"""Products of up to 16 rows of x with weights on Hopper, in Gluon: weights wait in shared memory for x.

A program asks for its weights by asynchronous copies before x is there, which take neither registers nor threads that
wait: while the kernel that makes x still runs, all of a small layer is on its way. The warps of a program divide the
inner dimension and add their sums at the end. Each program normalizes the rows that it reads.

The product of 16 by 8 by 16 is PTX of its own, since a thread must know which words it has: 16 rows of x, eight rows of
weights, and of each 16 neighbouring bytes at a time; in which order does not matter to a sum.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphllm.ir import CallSite, GluonKernel, runs_gluon
from graphllm.ops.gemm.fused_linear.gluon_rows import copy, count, in_order
from graphllm.ops.gemm.fused_linear.launch_constants import Config, aligned
from graphllm.ops.gemm.fused_linear.op import fused_linear
from graphllm.ops.gemm.fused_linear.triton_fused_linear import plain
from graphllm.ops.gemm.linear.operands import Matrix, Norm

_MOST_ROWS = 16
_MOST_INNER = 4096  # inner entries; a thread has its share of x in registers
_MOST_NUMBERS = 1 << 24  # of a matrix: larger ones are read as fast by the kernels of `triton_fused_linear`
_WARPS = 8
_TILE = 8 * 128 * _WARPS * 2  # bytes
_MOST_TILES = 8  # of a step, which `_joined` joins
_SHARED = 96 * 1024  # bytes of weights under way in a program: leaves room for a program of the next kernel


@triton.constexpr_function
def _words_layout(warps):
    """By which threads words [warps, 8 rows, 4, 4] are multiplied: 16 bytes of a row each."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [warps, 1, 1, 1], [3, 2, 1, 0])


@triton.constexpr_function
def _tile_layout(warps):
    """The same threads, for words [warps, 4, 8 rows, 4, 4]."""
    return gl.BlockedLayout([1, 4, 1, 1, 4], [1, 1, 8, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@triton.constexpr_function
def _copy_layout(warps):
    """By which threads words [warps, 4, 8 rows, 4, 4] are copied: 128 bytes of four rows at a time."""
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 2, 0, 0, 0], [0, 0, 4, 0, 0]]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0]]
    of_warps = [[1 << i, 0, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, 4, 8, 4, 4])


@gluon.jit
def _plus_product(acc, weight, x, below):
    """[W, 8, 4, 4]: sums of 16 rows of x and 8 of weights, a thread's four, and 32 products more. below: words of the
    lower 8 rows of x."""
    return gl.inline_asm_elementwise(
        """
        {
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$8,$12,$9,$13}, {$4,$5}, {$16,$17,$18,$19};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$10,$14,$11,$15}, {$6,$7}, {$0,$1,$2,$3};
        }
        """,
        "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f", [weight, x, below, acc],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _times(a, b):
    """Pairs of bf16 times pairs of bf16."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _squares(word):
    """[W, 8, 4] of pairs of bf16: the sum of a thread's squares."""
    low = (word << 16).to(gl.float32, bitcast=True)
    high = (word & -65536).to(gl.float32, bitcast=True)
    return gl.sum(low * low + high * high, axis=3)


@gluon.jit
def _words(ptr):
    return ptr.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _row(block, group, r, N: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr):
    """The r-th row of a program's group of weights, and whether there is one. With a gate, groups of its rows and of
    the value's come in turn."""
    if GATED:
        column = (block * GROUPS + group // 2) * 8 + r
        return column + group % 2 * (N // 2), column < N // 2
    else:
        n = (block * GROUPS + group) * 8 + r
        return n, n < N


@gluon.jit
def _ask_for_tile(
    slot, weight_ptr, i: gl.constexpr, block,
    WEIGHT_ROW: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Copy eight rows of weights, of 128 entries a warp."""
    TOGETHER: gl.constexpr = 2 * GROUPS if GATED else GROUPS
    layout: gl.constexpr = _copy_layout(WARPS)
    step: gl.constexpr = i // TOGETHER
    group: gl.constexpr = i % TOGETHER
    n, inside = _row(block, group, count(layout, 5, 2, 8), N, GATED, GROUPS)
    k = count(layout, 5, 0, WARPS) * 64 + count(layout, 5, 1, 4) * 16 + count(layout, 5, 3, 4) * 4
    k += count(layout, 5, 4, 4) + step * (WARPS * 64)
    at = n * (WEIGHT_ROW // 2) + k
    if (step + 1) * WARPS * 128 > K:
        inside = inside & (k < K // 2)
    copy(slot, _words(weight_ptr) + at, mask=inside.broadcast_to(at.type.shape), cache_modifier=".cg")
    async_copy.commit_group()


@gluon.jit
def _x_of_step(x_ptr, step: gl.constexpr, first, T, X_ROW: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """Words of eight rows of x from one on, of a step's entries of each warp: four of [W, 8, 4, 4]."""
    layout: gl.constexpr = _words_layout(WARPS)
    t = first + count(layout, 4, 1, 8)
    k = step * (WARPS * 64) + count(layout, 4, 0, WARPS) * 64 + count(layout, 4, 2, 4) * 4 + count(layout, 4, 3, 4)
    units = ()
    for u in gl.static_range(4):
        inside = t < T
        if (step + 1) * WARPS * 128 > K:
            inside = inside & (k + u * 16 < K // 2)
        at = t * (X_ROW // 2) + k + u * 16
        units += (gl.load(_words(x_ptr) + at, mask=inside.broadcast_to(at.type.shape), other=0),)
    return units


@gluon.jit
def _tile(slot, WARPS: gl.constexpr):
    """A tile's words in shared memory: four of [W, 8, 4, 4]."""
    words = gl.permute(slot.load(_tile_layout(WARPS)), (0, 2, 3, 4, 1))
    even, odd = gl.split(gl.reshape(words, [WARPS, 8, 4, 4, 2, 2]))
    layout: gl.constexpr = _words_layout(WARPS)
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return (
        gl.convert_layout(w0, layout), gl.convert_layout(w1, layout),
        gl.convert_layout(w2, layout), gl.convert_layout(w3, layout),
    )  # fmt: skip


@gluon.jit
def _joined(parts, COUNT: gl.constexpr):
    """COUNT tensors, a power of two up to 8, as the last dimension of one; zeros beyond those there are."""
    some = parts
    for _ in gl.static_range(COUNT - len(parts)):
        some += (gl.zeros_like(parts[0]),)
    if COUNT == 1:
        joined = some[0]
    elif COUNT == 2:
        joined = gl.join(some[0], some[1])
    elif COUNT == 4:
        joined = gl.join(gl.join(some[0], some[2]), gl.join(some[1], some[3]))
    else:
        even = gl.join(gl.join(some[0], some[4]), gl.join(some[2], some[6]))
        joined = gl.join(even, gl.join(gl.join(some[1], some[5]), gl.join(some[3], some[7])))
    return joined


@gluon.jit
def few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, T, X_ROW: gl.constexpr, WEIGHT_ROW: gl.constexpr,
    RESIDUAL_ROW: gl.constexpr, N: gl.constexpr, K: gl.constexpr, EPS: gl.constexpr, NORM: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GATED: gl.constexpr,
    HALVES: gl.constexpr,  # of 16 rows of x
    GROUPS: gl.constexpr,  # of eight rows of weights that a program has; with a gate, of each of the two
    SLOTS: gl.constexpr,  # tiles under way
    WARPS: gl.constexpr,
):  # fmt: skip
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    TOGETHER: gl.constexpr = 2 * GROUPS if GATED else GROUPS
    STEPS: gl.constexpr = (K + WARPS * 128 - 1) // (WARPS * 128)
    TILES: gl.constexpr = STEPS * TOGETHER
    COUNT: gl.constexpr = triton.next_power_of_2(GROUPS) * (2 if GATED else 1)
    ROWS: gl.constexpr = 8 * HALVES
    block = gl.program_id(0)
    ring = ()  # buffers of their own: Triton would put barriers between accesses to parts of one
    for _ in gl.static_range(SLOTS):
        ring += (gl.allocate_shared_memory(gl.int32, [WARPS, 4, 8, 4, 4], in_order(5)),)
    for i in gl.static_range(SLOTS):
        _ask_for_tile(ring[i], weight_ptr, i, block, WEIGHT_ROW, N, K, GATED, GROUPS, WARPS)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    layout: gl.constexpr = _words_layout(WARPS)
    nothing = gl.zeros([WARPS, 8, 4, 4], gl.int32, layout=layout)
    accs = ()
    for _ in gl.static_range(TOGETHER):
        accs += (gl.zeros([WARPS, 8, 4, 4], gl.float32, layout=layout),)
    squares = gl.zeros([WARPS, 8, 4], gl.float32, layout=gl.SliceLayout(3, layout))
    squares_below = squares
    for step in gl.static_range(STEPS):
        x = _x_of_step(x_ptr, step, 0, T, X_ROW, K, WARPS)
        below = (nothing, nothing, nothing, nothing)
        if HALVES == 2:
            below = _x_of_step(x_ptr, step, 8, T, X_ROW, K, WARPS)
        if NORM:
            norm = _x_of_step(norm_ptr, step, 0, 8, 0, K, WARPS)
            scaled = ()
            scaled_below = ()
            for u in gl.static_range(4):
                squares += _squares(x[u])
                scaled += (_times(x[u], norm[u]),)
                if HALVES == 2:
                    squares_below += _squares(below[u])
                    scaled_below += (_times(below[u], norm[u]),)
                else:
                    scaled_below += (nothing,)
            x = scaled
            below = scaled_below
        async_copy.wait_group(min(TILES, SLOTS + step * TOGETHER) - (step + 1) * TOGETHER)
        plus = ()
        for group in gl.static_range(TOGETHER):
            tile = _tile(ring[(step * TOGETHER + group) % SLOTS], WARPS)
            acc = accs[group]
            for u in gl.static_range(4):
                acc = _plus_product(acc, tile[u], x[u], below[u])
            plus += (acc,)
        accs = plus
        for i in gl.static_range(min(TILES, SLOTS + step * TOGETHER), min(TILES, SLOTS + (step + 1) * TOGETHER)):
            _ask_for_tile(ring[i % SLOTS], weight_ptr, i, block, WEIGHT_ROW, N, K, GATED, GROUPS, WARPS)

    parts = ()
    for group in gl.static_range(TOGETHER):
        halves = gl.permute(gl.reshape(accs[group], [WARPS, 8, 4, 2, 2]), (0, 1, 2, 4, 3))
        upper, lower = gl.split(halves)
        if HALVES == 2:
            both = gl.permute(gl.join(upper, lower), (0, 4, 1, 2, 3))
            parts += (gl.reshape(both, [WARPS, 16, 8]),)
        else:
            parts += (gl.reshape(upper, [WARPS, 8, 8]),)
    sums_layout: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 1, 2 if GATED else 1], [1, 4, 8, 1], [1, 2, 1, WARPS // 2], [3, 2, 1, 0]
    )
    room = gl.allocate_shared_memory(
        gl.float32, [WARPS, ROWS, 8, COUNT], in_order(4), gl.reshape(_joined(parts, COUNT), [WARPS, ROWS, 8, COUNT])
    )
    if NORM:
        if HALVES == 2:
            squares = gl.reshape(gl.permute(gl.join(squares, squares_below), (0, 3, 1, 2)), [WARPS, 16, 4])
        total = gl.sum(squares, axis=2)
        squares_room = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], in_order(2), total)
    out = gl.sum(room.load(sums_layout), axis=0)
    if NORM:
        total = squares_room.load(gl.SliceLayout(2, gl.SliceLayout(3, sums_layout)))
        out *= gl.rsqrt(gl.sum(gl.expand_dims(gl.expand_dims(total, 2), 3), axis=0) / K + EPS)
    sums: gl.constexpr = out.type.layout
    if BIAS:
        n, in_row = _row(block, count(sums, 3, 2, COUNT), count(sums, 3, 1, 8), N, GATED, GROUPS)
        out += gl.load(bias_ptr + n, mask=in_row, other=0.0).to(gl.float32)
    if GATED:
        gate, value = gl.split(gl.reshape(out, [ROWS, 8, COUNT // 2, 2]))
        out = gate / (1.0 + gl.exp(-gate)) * value
    WIDTH: gl.constexpr = N // 2 if GATED else N
    GROUPS_ROOM: gl.constexpr = COUNT // 2 if GATED else COUNT
    last: gl.constexpr = out.type.layout
    group = count(last, 3, 2, GROUPS_ROOM)
    t = count(last, 3, 0, ROWS)
    column = (block * GROUPS + group) * 8 + count(last, 3, 1, 8)
    inside = (t < T) & (group < GROUPS) & (column < WIDTH)
    if RESIDUAL:
        out += gl.load(residual_ptr + t * RESIDUAL_ROW + column, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_ptr + t * WIDTH + column, out.to(gl.bfloat16), mask=inside)


_kernel = GluonKernel(
    few_rows_kernel,
    "(Tensor x, Tensor weight, Tensor bias, Tensor norm, Tensor residual, Tensor(a!) out, SymInt T) -> ()",
    warps=_WARPS,
    early=True,
)


def _serves(site: CallSite) -> bool:
    x, weight = site.args["x_TI"], site.args["weight_OI"]
    return (
        plain(site)
        and x.dtype == torch.bfloat16
        and site.rows("x_TI") <= _MOST_ROWS
        and x.shape[1] <= _MOST_INNER
        and x.shape[1] % 32 == 0
        and weight.shape[0] % (16 if site.args["gated"] else 8) == 0
        and weight.numel() < _MOST_NUMBERS
        and (site.args["norm_I"] is None or site.args["norm_I"].dtype == x.dtype)
        and aligned(site)
        and not site.deterministic
        and runs_gluon(site.target)
    )


def _configs(site: CallSite) -> list[Config]:
    """One program for each multiprocessor, or two, or four."""
    halves = 1 if site.rows("x_TI") <= 8 else 2
    both = 2 if site.args["gated"] else 1  # tiles of a step for each group
    groups = -(-site.args["weight_OI"].shape[0] // (8 * both))
    steps = -(-site.args["x_TI"].shape[1] // (128 * _WARPS))
    shares = (min(-(-groups // (n * site.target.multiprocessors)), _MOST_TILES // both) for n in (1, 2, 4))
    return [
        {"halves": halves, "groups": share, "slots": min(steps * share * both, max(share * both, _SHARED // _TILE))}
        for share in dict.fromkeys(shares)
    ]


@fused_linear.impl("gluon_few_rows", device="cuda", supports=_serves, configs=_configs)
def gluon_few_rows(
    x_TI: Tensor,
    matrix: Matrix,
    before: Norm | None,
    residual_TN: Tensor | None,
    gated: bool,
    *,
    halves: int,
    groups: int,
    slots: int,
) -> Tensor:
    """Sums, bias, gate and residual in float32, then rounded."""
    weight_OI, bias_O = matrix[:2]
    norm_I, eps = before or (None, 0.0)
    (T, K), N, width = x_TI.shape, weight_OI.shape[0], matrix.width(gated)
    out_TN = x_TI.new_empty((T, width))
    _kernel(
        -(-width // (8 * groups)), x_TI, weight_OI, *(x_TI if t is None else t for t in (bias_O, norm_I, residual_TN)),
        out_TN, T, X_ROW=x_TI.stride(0), WEIGHT_ROW=weight_OI.stride(0),
        RESIDUAL_ROW=0 if residual_TN is None else residual_TN.stride(0), N=N, K=K, EPS=eps, NORM=norm_I is not None,
        BIAS=bias_O is not None, RESIDUAL=residual_TN is not None, GATED=gated, HALVES=halves, GROUPS=groups,
        SLOTS=slots, WARPS=_WARPS, maxnreg=128,
    )  # fmt: skip
    return out_TN
