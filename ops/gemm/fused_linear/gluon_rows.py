"""What kernels in Gluon share that multiply one row with weights of four bits, sixteen rows a program: every warp has a
part of the inner dimension, 64 neighbouring int16 of a row at a time, and every column of the right operand is x.

Which entry of an operand is which inner entry is chosen so that no thread needs another one's numbers.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphllm.ops.gemm.fused_linear.gluon_int4 import seen_as

ROWS_AT_ONCE = 16  # of weights, by a program
# Until Triton 3.6.
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@triton.constexpr_function
def _along(layout, rank, dim):
    """The layout of one dimension of a tensor."""
    for d in reversed(range(rank)):
        if d != dim:
            layout = gl.SliceLayout(d, layout)
    return layout


@triton.constexpr_function
def in_order(rank):
    """Shared memory in the order of a tensor's entries."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@triton.constexpr_function
def words_of(warps):
    """By which threads weights [warps, 2, 2, 8, 32] are multiplied: by half of the sixteen rows, half of the int16."""
    return gl.BlockedLayout([1, 2, 2, 1, 8], [1, 1, 1, 8, 4], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@triton.constexpr_function
def whole_lines(warps):
    """By which threads weights [warps, 2, 2, 8, 32] are copied: 128 bytes of four rows at a time."""
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 0, 4, 0], [0, 1, 0, 0, 0]]
    lanes = [[0, 0, 0, 0, 8], [0, 0, 0, 0, 16], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 2, 0]]
    of_warps = [[1 << i, 0, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, 2, 2, 8, 32])


@triton.constexpr_function
def steps_of(inner, warps):
    """Of each warp, 64 int16 of a row at a time; in the last one, some may have nothing to do."""
    return -(-inner // (256 * warps))


@gluon.jit
def row_of(half, row, block, N: gl.constexpr, GATED: gl.constexpr):
    """Of N rows of weights, in a half of a block's sixteen. With a gate, eight rows of it and eight of the value."""
    if GATED:
        return block * 8 + row + half * (N // 2)
    else:
        return block * 16 + half * 8 + row


@gluon.jit
def count(layout: gl.constexpr, RANK: gl.constexpr, DIM: gl.constexpr, SIZE: gl.constexpr):
    """0, 1 ... along dimension DIM of a tensor of RANK dimensions."""
    values = gl.arange(0, SIZE, layout=_along(layout, RANK, DIM))
    for d in gl.static_range(RANK):
        if d != DIM:
            values = gl.expand_dims(values, d)
    return values


@gluon.jit
def _operand(loaded, WARPS: gl.constexpr, ROWS: gl.constexpr):
    """[WARPS, ROWS, 64] of [WARPS, ROWS // 8, 2, 8, 32]: entries in the order in which a product takes a thread's."""
    parts = gl.reshape(loaded, [WARPS, ROWS // 8, 2, 8, 4, 2, 2, 2])
    return gl.reshape(gl.permute(parts, (0, 1, 3, 2, 5, 6, 4, 7)), [WARPS, ROWS, 64])


@gluon.jit
def plus_product(acc, number, x, words: gl.constexpr, WARPS: gl.constexpr):
    """acc [WARPS, 16, 8] + the product of numbers, of the layout of words, with x in shared memory [WARPS, 2, 32]."""
    mma: gl.constexpr = acc.type.layout
    row = x.load(gl.SliceLayout(1, gl.SliceLayout(3, words)))
    row = gl.expand_dims(gl.expand_dims(row, 1), 3).broadcast_to([WARPS, 1, 2, 8, 32])
    row = gl.permute(_operand(row, WARPS, 8), (0, 2, 1))
    number = gl.convert_layout(_operand(number, WARPS, 16), gl.DotOperandLayout(0, mma, 2))
    return mma_v2(number, gl.convert_layout(row, gl.DotOperandLayout(1, mma, 2)), acc)


@gluon.jit
def added_up(acc, WARPS: gl.constexpr):
    """[halves, rows, columns]: the sums of all warps; a thread has both halves."""
    layout: gl.constexpr = gl.BlockedLayout([WARPS, 2, 1, 1], [1, 1, 8, 4], [1, 1, 1, WARPS], [2, 3, 1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, 16, 8], in_order(3), acc)
    return gl.sum(seen_as(sums, [WARPS, 2, 8, 8], in_order(4)).load(layout), axis=0)
