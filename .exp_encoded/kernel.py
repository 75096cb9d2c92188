"""Products of one to eight rows of x with int4 weights (groups of 128, zero points), in Gluon: an experiment.

A program's rows of weights are asked for before x is there, by asynchronous copies to shared memory, which take neither
registers nor scoreboards: all of them, or a ring of steps. Each lane copies the very bytes that it multiplies later, in
the order in which the tensor cores want them, so neither copies nor loads have bank conflicts. The warps divide the
inner dimension in spans, as in `graphllm.ops.fused_linear.triton_direct`, and add their sums at the end.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # since Triton 3.7 or later


@triton.constexpr_function
def along(layout, rank, dim):
    """The layout of one dimension of a tensor."""
    for d in reversed(range(rank)):
        if d != dim:
            layout = gl.SliceLayout(d, layout)
    return layout


@triton.constexpr_function
def linear(rank):
    """Shared memory in the order of a tensor's entries."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@triton.constexpr_function
def steps_of(inner, warps):
    """Of each warp; in the last one, some may have nothing to do."""
    return -(-inner // (256 * warps))


@triton.constexpr_function
def copied(warps, halves, wide):
    """The layout by which weights are copied: each lane what it multiplies, eight rows' halves of 128 bytes at a time;
    or, wide, whole 128 bytes of four rows."""
    if not wide:
        return gl.BlockedLayout([1, halves, 2, 1, 8], [1, 1, 1, 8, 4], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 0, 4, 0]]
    registers += [[0, 1 << i, 0, 0, 0] for i in range(halves.bit_length() - 1)]
    lanes = [[0, 0, 0, 0, 8], [0, 0, 0, 0, 16], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 2, 0]]
    of_warps = [[1 << i, 0, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, halves, 2, 8, 32])


@triton.constexpr_function
def power_of_2(n):
    return 1 << (n - 1).bit_length()


@gluon.jit
def _seen_as(buffer, SHAPE: gl.constexpr, RANK: gl.constexpr):
    """Shared memory in another shape: one buffer, or as many as the first dimension says, of the RANK others."""
    if _RENAMED:
        return buffer.reinterpret(buffer.dtype, SHAPE, linear(RANK))
    else:
        return buffer._reinterpret(buffer.dtype, SHAPE, linear(RANK))


@gluon.jit
def _spread(values, RANK: gl.constexpr, DIM: gl.constexpr):
    """Numbers along one dimension as a tensor of so many dimensions."""
    for d in gl.static_range(RANK):
        if d != DIM:
            values = gl.expand_dims(values, d)
    return values


@gluon.jit
def _count(layout: gl.constexpr, RANK: gl.constexpr, DIM: gl.constexpr, SIZE: gl.constexpr):
    return _spread(gl.arange(0, SIZE, layout=along(layout, RANK, DIM)), RANK, DIM)


@gluon.jit
def _row_of(half, row, block, N: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of the weights. With a gate, eight rows of the gate and eight of the value in turn."""
    if GATED:
        return block * (BLOCK_N // 2) + half // 2 * 8 + row + half % 2 * (N // 2)
    else:
        return block * BLOCK_N + half * 8 + row


@gluon.jit
def _decoded(words):
    """bf16 pairs of the four codes of each int16, 128 added to a code."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 t;
        lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xEA;
        shr.b32 t, $4, 4;
        lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xEA;
        shr.b32 t, $4, 8;
        lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xEA;
        shr.b32 t, $4, 12;
        lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xEA; }""",
        "=&r,=&r,=&r,=&r,r", [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _less(numbers, zeros):
    return gl.inline_asm_elementwise(
        "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, zeros], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _inner_last(loaded, WARPS: gl.constexpr, ROWS: gl.constexpr):
    """[WARPS, ROWS, 64] of [WARPS, ROWS // 8, 2, 8, 32]: entries in the order in which a product takes a thread's."""
    parts = gl.reshape(loaded, [WARPS, ROWS // 8, 2, 8, 4, 2, 2, 2])
    return gl.reshape(gl.permute(parts, (0, 1, 3, 2, 5, 6, 4, 7)), [WARPS, ROWS, 64])


@gluon.jit
def _x_of(
    kept, x_ptr, there, step, j,
    words: gl.constexpr, WARPS: gl.constexpr, X_ROW: gl.constexpr, K: gl.constexpr, SHARED_ROWS: gl.constexpr,
):  # fmt: skip
    """[WARPS, 64, 8] of x: what the j-th codes of a step are multiplied with."""
    if SHARED_ROWS == 1:  # every token is the first one
        buffer = _seen_as(kept[step], [4, WARPS, 2, 32], 3)
        x = buffer.index(j).load(gl.SliceLayout(1, gl.SliceLayout(3, words)))
        x = gl.expand_dims(gl.expand_dims(x, 1), 3).broadcast_to([WARPS, 1, 2, 8, 32])
    elif SHARED_ROWS == 8:
        buffer = _seen_as(kept[step], [4, WARPS, 2, 8, 32], 4)
        x = gl.expand_dims(buffer.index(j).load(gl.SliceLayout(1, words)), 1)
    else:
        at = (step * WARPS + _count(words, 5, 0, WARPS)) * 256 + j * 64
        if (step + 1) * WARPS * 256 > K:
            there = there & (at < K)
        at = at + _count(words, 5, 2, 2) * 32 + _count(words, 5, 4, 32) + _count(words, 5, 3, 8) * X_ROW
        x = gl.load(x_ptr + at, mask=there, other=0.0)
    return gl.permute(_inner_last(x, WARPS, 8), (0, 2, 1))


@gluon.jit
def _step_of_x(
    kept, x_ptr, there, step,
    words: gl.constexpr, WARPS: gl.constexpr, X_ROW: gl.constexpr, K: gl.constexpr, SHARED_ROWS: gl.constexpr,
):  # fmt: skip
    found = ()
    for j in gl.static_range(4):
        found += (_x_of(kept, x_ptr, there, step, j, words, WARPS, X_ROW, K, SHARED_ROWS),)
    return found


@gluon.jit
def _ask_for(
    ring, weights_at, step, words: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    at = weights_at + step * (WARPS * 64)
    if (step + 1) * WARPS * 256 > K:
        inside = (step * WARPS + _count(words, 5, 0, WARPS) < K // 256).broadcast_to(at.type.shape)
        _copy(ring[step % RING], at, mask=inside, cache_modifier=".cg")
    else:
        _copy(ring[step % RING], at, cache_modifier=".cg")
    async_copy.commit_group()


@gluon.jit
def _weights_at(
    weight_ptr, block, words: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Where the first step of a program's weights lies."""
    row = _row_of(_count(words, 5, 1, BLOCK_N // 8), _count(words, 5, 3, 8), block, N, GATED, BLOCK_N)
    entry = _count(words, 5, 0, WARPS) * 64 + _count(words, 5, 2, 2) * 32 + _count(words, 5, 4, 32)
    return weight_ptr + row * (K // 4) + entry


@gluon.jit
def _ask_for_constants(
    scales, zeros, scales_ptr, zeros_ptr, block, limit,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    PADDED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """All scales and zero points of a program's rows: by step, half of a span, and warp. MASKED: of blocks below a
    limit only."""
    HALVES: gl.constexpr = BLOCK_N // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [32 // HALVES, HALVES, 1], [WARPS, 1, 1], [2, 1, 0])
    place = _count(layout, 3, 0, PADDED)
    group = (place // (2 * WARPS) * WARPS + place % WARPS) * 2 + place // WARPS % 2
    at = group * N + _row_of(_count(layout, 3, 1, HALVES), _count(layout, 3, 2, 8), block, N, GATED, BLOCK_N)
    if MASKED:
        inside = ((group < K // 128) & (group * 0 + block < limit)).broadcast_to([PADDED, HALVES, 8])
        _copy(scales, scales_ptr + at, mask=inside)
        _copy(zeros, zeros_ptr + at, mask=inside)
    elif PADDED > K // 128:
        inside = (group < K // 128).broadcast_to([PADDED, HALVES, 8])
        _copy(scales, scales_ptr + at, mask=inside)
        _copy(zeros, zeros_ptr + at, mask=inside)
    else:
        _copy(scales, scales_ptr + at)
        _copy(zeros, zeros_ptr + at)


@gluon.jit
def _norm_weights(norm_ptr, K: gl.constexpr, NORM: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 8], [4, 1, 2, 1, 4], [1, WARPS, 1, 1, 1], [4, 3, 2, 1, 0])
    norms = ()
    if NORM:
        at = (_count(layout, 5, 1, WARPS) * 4 + _count(layout, 5, 0, 4)) * 64
        at = at + _count(layout, 5, 2, 2) * 32 + _count(layout, 5, 4, 32)
        for step in gl.static_range(steps_of(K, WARPS)):
            norms += (gl.load(norm_ptr + step * (WARPS * 256) + at, mask=at < K - step * (WARPS * 256), other=0.0),)
    return norms


@gluon.jit
def _kept_x(
    x_ptr, norms, T,
    X_ROW: gl.constexpr, K: gl.constexpr, EPS: gl.constexpr, NORM: gl.constexpr, WARPS: gl.constexpr,
    SHARED_ROWS: gl.constexpr,
):  # fmt: skip
    """x in shared memory, step by step, times the norm's weights, and what the norm multiplies sums with."""
    SIZE: gl.constexpr = [4, WARPS, 2, SHARED_ROWS, 32]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, SHARED_ROWS, 8], [4, 1, 2, 1, 4], [1, WARPS, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    span = _count(layout, 5, 1, WARPS)
    at = x_ptr + (span * 4 + _count(layout, 5, 0, 4)) * 64
    at = at + _count(layout, 5, 2, 2) * 32 + _count(layout, 5, 4, 32) + _count(layout, 5, 3, SHARED_ROWS) * X_ROW
    there = _count(layout, 5, 3, SHARED_ROWS) < T
    STEPS: gl.constexpr = steps_of(K, WARPS)
    TOGETHER: gl.constexpr = STEPS if SHARED_ROWS == 1 else 1  # loads under way, as there are registers
    kept = ()
    squares = gl.zeros(SIZE, gl.float32, layout=layout)
    for first in gl.static_range(0, STEPS, TOGETHER):
        loaded = ()
        for step in gl.static_range(first, first + TOGETHER):
            inside = (there & (step * WARPS + span < K // 256)).broadcast_to(SIZE)
            loaded += (gl.load(at + step * (WARPS * 256), mask=inside, other=0.0),)
        for step in gl.static_range(first, first + TOGETHER):
            x = loaded[step - first]
            if NORM:
                x = x.to(gl.float32)
                squares += x * x
                x = (x * norms[step].to(gl.float32)).to(gl.bfloat16)
            kept += (gl.allocate_shared_memory(gl.bfloat16, SIZE, linear(5), x),)
    factor = 1.0
    if NORM:
        total = gl.sum(gl.sum(gl.sum(gl.sum(gl.sum(squares, 4), 3), 2), 0), 0)
        factor = gl.rsqrt(total / K + EPS)
    return kept, factor


@gluon.jit
def _plus_step(
    acc, word, scales, zeros, first, kept, x_ptr, there, step, operands,
    words: gl.constexpr, X_ROW: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    SHARED_ROWS: gl.constexpr,
):  # fmt: skip
    """The sums and what a step adds. first: of the step's groups. operands: the step's x, if it is in registers."""
    mma: gl.constexpr = acc.type.layout
    numbers = _decoded(word)
    for u in gl.static_range(2):
        zero = zeros.index(first + u).load(gl.SliceLayout(2, gl.SliceLayout(4, words)))
        zero = (zero + 0x4308).to(gl.bfloat16, bitcast=True)  # 136 more; right for zero points from -8 to 119
        zero = gl.expand_dims(gl.expand_dims(zero, 2), 4)
        part = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, layout=mma)
        for i in gl.static_range(2):
            number = _inner_last(_less(numbers[2 * u + i], zero), WARPS, BLOCK_N)
            if len(operands) > 0:
                x = operands[2 * u + i]
            else:
                x = _x_of(kept, x_ptr, there, step, 2 * u + i, words, WARPS, X_ROW, K, SHARED_ROWS)
            number = gl.convert_layout(number, gl.DotOperandLayout(0, mma, 2))
            x = gl.convert_layout(x, gl.DotOperandLayout(1, mma, 2))
            part = mma_v2(number, x, part)
        scale = scales.index(first + u).load(gl.SliceLayout(2, mma))
        acc += part * gl.expand_dims(scale.to(gl.float32), 2)
    return acc


@gluon.jit
def _place_of_out(block, T, N: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """Which numbers of the output, and of the residual, a thread has, and whether they are there."""
    ROWS: gl.constexpr = BLOCK_N // 16 if GATED else BLOCK_N // 8
    layout: gl.constexpr = gl.BlockedLayout([ROWS, 1, 1], [1, 8, 4], [1, 1, WARPS], [1, 2, 0])
    token = _count(layout, 3, 2, 8)
    at = token * (N // 2 if GATED else N) + block * (ROWS * 8)
    at = at + _count(layout, 3, 0, ROWS) * 8 + _count(layout, 3, 1, 8)
    return at, (token < T).broadcast_to([ROWS, 8, 8])


@gluon.jit
def _result(acc, factor, GATED: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """The warps' sums added up, and the gate: a thread has all halves of a row and token."""
    HALVES: gl.constexpr = BLOCK_N // 8
    layout: gl.constexpr = gl.BlockedLayout([WARPS, HALVES, 1, 1], [1, 1, 8, 4], [1, 1, 1, WARPS], [2, 3, 1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_N, 8], linear(3), acc)
    parts = _seen_as(sums, [WARPS, HALVES, 8, 8], 4).load(layout)
    out = gl.sum(parts, axis=0) * factor
    if GATED:
        gate, value = gl.split(gl.permute(gl.reshape(out, [HALVES // 2, 2, 8, 8]), (0, 2, 3, 1)))
        out = gate / (1.0 + gl.exp(-gate)) * value
        return gl.convert_layout(
            out, gl.BlockedLayout([HALVES // 2, 1, 1], [1, 8, 4], [1, 1, WARPS], [1, 2, 0]), assert_trivial=True
        )
    else:
        return gl.convert_layout(
            out, gl.BlockedLayout([HALVES, 1, 1], [1, 8, 4], [1, 1, WARPS], [1, 2, 0]), assert_trivial=True
        )


@gluon.jit
def encoded_kernel(
    x_ptr,  # [T, K] bf16
    weight_ptr,  # [N, K // 4] int16
    scales_ptr,  # [K // 128, N] f16
    zeros_ptr,  # [K // 128, N] int16
    norm_ptr,  # [K]
    residual_ptr,  # [T, N]
    out_ptr,
    T,
    X_ROW: gl.constexpr,
    N: gl.constexpr,  # rows of weights, a multiple of BLOCK_N
    K: gl.constexpr,  # a multiple of 256
    EPS: gl.constexpr,
    NORM: gl.constexpr,
    RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
    RING: gl.constexpr,  # steps whose weights are under way
    SHARED_ROWS: gl.constexpr,  # of x that go through shared memory: 1, 8, or 0: each thread reads what it multiplies
    X_AHEAD: gl.constexpr,  # steps whose x is in registers or under way; 0: it is read where it is multiplied
    WIDE: gl.constexpr,  # copies of whole 128 bytes
):
    HALVES: gl.constexpr = BLOCK_N // 8
    STEPS: gl.constexpr = steps_of(K, WARPS)
    PADDED: gl.constexpr = power_of_2(STEPS) * WARPS * 2
    words: gl.constexpr = gl.BlockedLayout([1, HALVES, 2, 1, 8], [1, 1, 1, 8, 4], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    copies: gl.constexpr = copied(WARPS, HALVES, WIDE)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    block = gl.program_id(0)
    ring = ()  # buffers of their own: Triton would put barriers between accesses to parts of one
    for _ in gl.static_range(RING):
        ring += (gl.allocate_shared_memory(gl.int16, [WARPS, HALVES, 2, 8, 32], linear(5)),)
    scales = gl.allocate_shared_memory(gl.float16, [PADDED, HALVES, 8], linear(3))
    zeros = gl.allocate_shared_memory(gl.int16, [PADDED, HALVES, 8], linear(3))
    _ask_for_constants(scales, zeros, scales_ptr, zeros_ptr, block, 0, N, K, GATED, BLOCK_N, WARPS, PADDED, False)
    weights_at = _weights_at(weight_ptr, block, copies, N, K, GATED, BLOCK_N, WARPS)
    for step in gl.static_range(RING):
        _ask_for(ring, weights_at, step, copies, RING, WARPS, K)
    norms = _norm_weights(norm_ptr, K, NORM, WARPS)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    kept = ()
    factor = 1.0
    if SHARED_ROWS:
        kept, factor = _kept_x(x_ptr, norms, T, X_ROW, K, EPS, NORM, WARPS, SHARED_ROWS)
    there = (_count(words, 5, 3, 8) < T).broadcast_to([WARPS, 1, 2, 8, 32])
    operands = ()
    for step in gl.static_range(min(X_AHEAD, STEPS)):
        operands += (_step_of_x(kept, x_ptr, there, step, words, WARPS, X_ROW, K, SHARED_ROWS),)
    at, inside = _place_of_out(block, T, N, GATED, BLOCK_N, WARPS)
    residual = 0.0
    if RESIDUAL:
        residual = gl.load(residual_ptr + at, mask=inside, other=0.0)

    by_row = _seen_as(scales, [PADDED // WARPS, WARPS, BLOCK_N], 2)
    by_half = _seen_as(zeros, [PADDED // WARPS, WARPS, HALVES, 8], 3)
    acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, layout=mma)
    for step in gl.static_range(STEPS):
        async_copy.wait_group(min(RING - 1, STEPS - 1 - step))
        word = ring[step % RING].load(words)
        if step + RING < STEPS:
            _ask_for(ring, weights_at, step + RING, copies, RING, WARPS, K)
        if X_AHEAD > 0 and step + X_AHEAD < STEPS:
            operands += (_step_of_x(kept, x_ptr, there, step + X_AHEAD, words, WARPS, X_ROW, K, SHARED_ROWS),)
        acc = _plus_step(
            acc, word, by_row, by_half, step * 2, kept, x_ptr, there, step, operands[step] if X_AHEAD > 0 else (),
            words, X_ROW, K, BLOCK_N, WARPS, SHARED_ROWS,
        )  # fmt: skip
    out = _result(acc, factor, GATED, BLOCK_N, WARPS)
    if RESIDUAL:
        out += residual.to(gl.float32)
    gl.store(out_ptr + at, out.to(gl.bfloat16), mask=inside)


@gluon.jit
def encoded_loop_kernel(
    x_ptr, weight_ptr, scales_ptr, zeros_ptr, norm_ptr, residual_ptr, out_ptr, T,
    X_ROW: gl.constexpr, N: gl.constexpr, K: gl.constexpr, EPS: gl.constexpr, NORM: gl.constexpr,
    RESIDUAL: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    RING: gl.constexpr,  # divides the steps
    SHARED_ROWS: gl.constexpr,  # 1 or 8
    X_AHEAD: gl.constexpr,  # 0
    WIDE: gl.constexpr,
):  # fmt: skip
    """`encoded_kernel` for fewer programs than blocks of rows: the next block's weights are asked for while one is
    multiplied, and x is read once."""
    HALVES: gl.constexpr = BLOCK_N // 8
    STEPS: gl.constexpr = steps_of(K, WARPS)
    PADDED: gl.constexpr = power_of_2(STEPS) * WARPS * 2
    BLOCKS: gl.constexpr = N // BLOCK_N
    gl.static_assert(STEPS % RING == 0)
    words: gl.constexpr = gl.BlockedLayout([1, HALVES, 2, 1, 8], [1, 1, 1, 8, 4], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    copies: gl.constexpr = copied(WARPS, HALVES, WIDE)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    first = gl.program_id(0)
    ring = ()
    for _ in gl.static_range(RING):
        ring += (gl.allocate_shared_memory(gl.int16, [WARPS, HALVES, 2, 8, 32], linear(5)),)
    scales = gl.allocate_shared_memory(gl.float16, [2, PADDED, HALVES, 8], linear(3))
    zeros = gl.allocate_shared_memory(gl.int16, [2, PADDED, HALVES, 8], linear(3))
    _ask_for_constants(
        scales.index(0), zeros.index(0), scales_ptr, zeros_ptr, first, 0, N, K, GATED, BLOCK_N, WARPS, PADDED, False
    )
    weights_at = _weights_at(weight_ptr, first, copies, N, K, GATED, BLOCK_N, WARPS)
    for step in gl.static_range(RING):
        _ask_for(ring, weights_at, step, copies, RING, WARPS, K)
    norms = _norm_weights(norm_ptr, K, NORM, WARPS)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    kept, factor = _kept_x(x_ptr, norms, T, X_ROW, K, EPS, NORM, WARPS, SHARED_ROWS)
    there = (_count(words, 5, 3, 8) < T).broadcast_to([WARPS, 1, 2, 8, 32])
    by_row = _seen_as(scales, [2 * PADDED // WARPS, WARPS, BLOCK_N], 2)
    by_half = _seen_as(zeros, [2 * PADDED // WARPS, WARPS, HALVES, 8], 3)
    turn = 0
    for block in range(first, BLOCKS, gl.num_programs(0)):
        after = block + gl.num_programs(0)
        acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, layout=mma)
        now_at = _weights_at(weight_ptr, block, copies, N, K, GATED, BLOCK_N, WARPS)
        after_at = _weights_at(weight_ptr, gl.minimum(after, BLOCKS - 1), copies, N, K, GATED, BLOCK_N, WARPS)
        more = (_count(copies, 5, 1, HALVES) * 0 + after < BLOCKS).broadcast_to([WARPS, HALVES, 2, 8, 32])
        for step in gl.static_range(STEPS):
            async_copy.wait_group(RING - 1)
            word = ring[step % RING].load(words)
            if step + RING < STEPS:
                _ask_for(ring, now_at, step + RING, copies, RING, WARPS, K)
            else:
                if step + RING == STEPS:
                    _ask_for_constants(
                        scales.index(1 - turn), zeros.index(1 - turn), scales_ptr, zeros_ptr, after, BLOCKS,
                        N, K, GATED, BLOCK_N, WARPS, PADDED, True,
                    )  # fmt: skip
                at = after_at + (step + RING - STEPS) * (WARPS * 64)
                _copy(ring[step % RING], at, mask=more, cache_modifier=".cg")
                async_copy.commit_group()
            acc = _plus_step(
                acc, word, by_row, by_half, turn * (PADDED // WARPS) + step * 2, kept, x_ptr, there, step, (),
                words, X_ROW, K, BLOCK_N, WARPS, SHARED_ROWS,
            )  # fmt: skip
        out_at, inside = _place_of_out(block, T, N, GATED, BLOCK_N, WARPS)
        out = _result(acc, factor, GATED, BLOCK_N, WARPS)
        if RESIDUAL:
            out += gl.load(residual_ptr + out_at, mask=inside, other=0.0).to(gl.float32)
        gl.store(out_ptr + out_at, out.to(gl.bfloat16), mask=inside)
        turn = 1 - turn
