"""Products of x with weights on Hopper in Gluon: a warp brings tiles of both into shared memory stages ahead, and two
groups of four warps multiply and write.

Weights, and what the TMA unit must know of them, are asked for while the kernel before this one still runs. So the
memory in which that is described must not be the last such kernel's: see `launch_dependents` below.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphllm.ir import GluonKernel
from graphllm.ops.gemm.fused_linear.launch_constants import SHARED

BLOCK_K = gl.constexpr(64)  # entries of a row that the TMA unit takes at once
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6


@gluon.jit
def _place(i, tiles_t, COLUMNS: gl.constexpr, TOGETHER: gl.constexpr):
    """The i-th tile's tile of tokens, and of columns. Programs of one moment share both."""
    first = i // (TOGETHER * COLUMNS) * TOGETHER
    size = gl.minimum(tiles_t - first, TOGETHER)
    within = i % (TOGETHER * COLUMNS)
    return first + within % size, within // size


@gluon.jit
def _item(
    i, tiles_t,
    COLUMNS: gl.constexpr, TOGETHER: gl.constexpr, STEPS: gl.constexpr, RANGES: gl.constexpr,
    PER_RANGE: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The i-th item of work: its tile of tokens and of columns, its part of the sum, and that part's first step and
    steps."""
    if PARTS:
        t, column = _place(i // RANGES, tiles_t, COLUMNS, TOGETHER)
        part = i % RANGES
        first = part * PER_RANGE
        return t, column, part, first, gl.minimum(STEPS - first, PER_RANGE)
    else:
        t, column = _place(i, tiles_t, COLUMNS, TOGETHER)
        return t, column, 0, 0, STEPS


@gluon.jit
def _gated(gate, value, ALIKE: gl.constexpr):
    """silu(gate) * value. ALIKE: rounded as `_gate` of Triton's kernels."""
    if ALIKE:
        return gate / (1.0 + gl.exp(-gate)) * value
    else:
        inverse = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp(-gate)], dtype=gl.float32, is_pure=True, pack=1
        )
        return gate * inverse * value


@gluon.jit
def _load_weights(
    weights, tile, column, k, arrived, N: gl.constexpr, BLOCK_N: gl.constexpr, PART: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Ask for the k-th entries of a tile's columns; with a gate the gate's and the value's in turn, PART of
    each."""
    if GATED:
        for b in gl.static_range(BLOCK_N // PART):
            first = column * (BLOCK_N // 2) + b // 2 * PART + b % 2 * (N // 2)
            _load_tile(weights, [first, k * BLOCK_K], arrived, tile.slice(b * PART, PART, dim=0))
    else:
        _load_tile(weights, [column * BLOCK_N, k * BLOCK_K], arrived, tile)


@gluon.jit
def _bring_tiles(
    rows, weights, x_smem, w_smem, full, free, count, tiles_t,
    N: gl.constexpr, GATED: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, PART: gl.constexpr,
    COLUMNS: gl.constexpr, STEPS: gl.constexpr, RANGES: gl.constexpr, PER_RANGE: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room. The first stages' weights are there
    before it waits for x."""
    _, column, _, first, steps = _item(gl.program_id(0), tiles_t, COLUMNS, TOGETHER, STEPS, RANGES, PER_RANGE, PARTS)
    early = gl.where(gl.program_id(0) < count, gl.minimum(steps, STAGES), 0)
    for stage in range(early):
        mbarrier.expect(full.index(stage), (BLOCK_T + BLOCK_N) * BLOCK_K * 2)
        _load_weights(weights, w_smem.index(stage), column, first + stage, full.index(stage), N, BLOCK_N, PART, GATED)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    n = 0
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        t, column, _, first, steps = _item(i, tiles_t, COLUMNS, TOGETHER, STEPS, RANGES, PER_RANGE, PARTS)
        for k in range(steps):
            stage = n % STAGES
            arrived = full.index(stage)
            mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
            if n >= early:
                mbarrier.expect(arrived, (BLOCK_T + BLOCK_N) * BLOCK_K * 2)
                _load_weights(weights, w_smem.index(stage), column, first + k, arrived, N, BLOCK_N, PART, GATED)
            _load_tile(rows, [t * BLOCK_T, (first + k) * BLOCK_K], arrived, x_smem.index(stage))
            n += 1


@gluon.jit
def _sum(
    x_smem, w_smem, full, free, n, steps,
    OWN_T: gl.constexpr, OWN_N: gl.constexpr, SIDES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What the next steps give a group; the first step is in the n-th stage."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_N, 16])
    acc = gl.zeros([OWN_T, OWN_N], gl.float32, layout=mma)
    for k in range(steps):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        x = x_smem.index(stage)
        w = w_smem.index(stage)
        if SIDES == 1:
            x = x.slice(GROUP * OWN_T, OWN_T, dim=0)
        else:
            w = w.slice(GROUP * OWN_N, OWN_N, dim=0)
        acc = hopper.warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index((n + STAGES - 1) % STAGES), count=1, pred=k > 0)
        n += 1
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((n + STAGES - 1) % STAGES), count=1)
    return acc, n


@gluon.jit
def _multiply(
    x_smem, w_smem, full, free, bias_ptr, residual_ptr, out_ptr, count, tiles_t, T,
    N: gl.constexpr, BIAS: gl.constexpr, RESIDUAL_ROW: gl.constexpr, GATED: gl.constexpr, ALIKE: gl.constexpr,
    BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, STEPS: gl.constexpr, RANGES: gl.constexpr,
    PER_RANGE: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: half of each tile's tokens or, where these are too few, of its columns."""
    SIDES: gl.constexpr = 2 if BLOCK_T == 64 else 1
    OWN_T: gl.constexpr = BLOCK_T * SIDES // 2
    OWN_N: gl.constexpr = BLOCK_N // SIDES
    WIDTH: gl.constexpr = N // 2 if GATED else N
    WRITTEN: gl.constexpr = OWN_N // 2 if GATED else OWN_N
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_N, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WRITTEN, WRITTEN // 8], [4, 1], [1, 0])
    # The next kernel may start when all programs are here, so the one before is over: two kernels at most overlap.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    n = 0
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        t, column, part, _, steps = _item(i, tiles_t, COLUMNS, TOGETHER, STEPS, RANGES, PER_RANGE, PARTS)
        if PARTS or RANGES == 1:
            acc, n = _sum(x_smem, w_smem, full, free, n, steps, OWN_T, OWN_N, SIDES, STAGES, GROUP)
        else:
            acc = gl.zeros([OWN_T, OWN_N], gl.float32, layout=mma)
            for r in range(RANGES):
                of_range = gl.minimum(STEPS - r * PER_RANGE, PER_RANGE)
                more, n = _sum(x_smem, w_smem, full, free, n, of_range, OWN_T, OWN_N, SIDES, STAGES, GROUP)
                acc += more
        row = t * BLOCK_T
        first = column * (BLOCK_N // 2 if GATED else BLOCK_N)
        if SIDES == 1:
            row += GROUP * OWN_T
        else:
            first += GROUP * WRITTEN
        if PARTS:
            r = row + gl.arange(0, OWN_T, layout=gl.SliceLayout(1, mma))
            c = first + gl.arange(0, OWN_N, layout=gl.SliceLayout(0, mma))
            inside = (r < T).expand_dims(1) & (c < N).expand_dims(0)
            at = (part * T + r).to(gl.int64) * N
            gl.store(out_ptr + at.expand_dims(1) + c.expand_dims(0), acc, mask=inside)
        else:
            if BIAS:
                c = gl.arange(0, OWN_N, layout=gl.SliceLayout(0, mma))
                at = first + c % WRITTEN
                bias = gl.load(bias_ptr + at + c // WRITTEN * WIDTH, mask=at < WIDTH, other=0.0)
                acc += bias.to(gl.float32).expand_dims(0)
            r = row + gl.arange(0, OWN_T, layout=gl.SliceLayout(1, wide))
            c = first + gl.arange(0, WRITTEN, layout=gl.SliceLayout(0, wide))
            inside = (r < T).expand_dims(1) & (c < WIDTH).expand_dims(0)
            if GATED:
                gate, value = acc.reshape([OWN_T, 2, WRITTEN]).permute((0, 2, 1)).split()
                acc = _gated(gate, value, ALIKE)
            if RESIDUAL_ROW > 0:
                at = residual_ptr + (r.to(gl.int64) * RESIDUAL_ROW).expand_dims(1) + c.expand_dims(0)
                acc += gl.convert_layout(gl.load(at, mask=inside, other=0.0), mma).to(gl.float32)
            out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), wide)
            gl.store(out_ptr + (r.to(gl.int64) * WIDTH).expand_dims(1) + c.expand_dims(0), out, mask=inside)


@gluon.jit
def hopper_product_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]; with a gate half of the rows are the gate's, then come the value's
    bias_ptr,  # [N]
    residual_ptr,  # [T, N], added without a gate
    out_ptr,  # [T, N], with a gate [T, N / 2]; float32 [RANGES, T, N] if PARTS
    T,
    X_ROW: gl.constexpr, WEIGHT_ROW: gl.constexpr,
    RESIDUAL_ROW: gl.constexpr,  # 0: none
    N: gl.constexpr, K: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    ALIKE: gl.constexpr,  # each row is that of `tile_kernel` among few
    BLOCK_T: gl.constexpr,  # tokens of a tile
    BLOCK_N: gl.constexpr,  # columns of a tile, with a gate half of them of that
    RANGES: gl.constexpr,  # in which the sum over K is made, one after another, each from zero
    PER_RANGE: gl.constexpr,  # steps of a range
    PARTS: gl.constexpr,  # each range is an item of work, and left to a kernel that follows
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,  # tiles of tokens that are multiplied with the same columns one after another
):  # fmt: skip
    PART: gl.constexpr = BLOCK_N if not GATED else BLOCK_N // (4 if BLOCK_T == 64 else 2)  # rows that are read at once
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    tiles_t = (T + BLOCK_T - 1) // BLOCK_T
    count = tiles_t * COLUMNS * (RANGES if PARTS else 1)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    rows = tma.make_tensor_descriptor(x_ptr, [T, K], [X_ROW, 1], [BLOCK_T, BLOCK_K], swizzled)
    weights = tma.make_tensor_descriptor(weight_ptr, [N, K], [WEIGHT_ROW, 1], [PART, BLOCK_K], swizzled)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, BLOCK_K], swizzled)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, w_smem, full, free, bias_ptr, residual_ptr, out_ptr, count, tiles_t, T, N, BIAS, RESIDUAL_ROW,
                GATED, ALIKE, BLOCK_T, BLOCK_N, COLUMNS, STEPS, RANGES, PER_RANGE, PARTS, STAGES, TOGETHER, 0,
            )),
            (_multiply, (
                x_smem, w_smem, full, free, bias_ptr, residual_ptr, out_ptr, count, tiles_t, T, N, BIAS, RESIDUAL_ROW,
                GATED, ALIKE, BLOCK_T, BLOCK_N, COLUMNS, STEPS, RANGES, PER_RANGE, PARTS, STAGES, TOGETHER, 1,
            )),
            (_bring_tiles, (
                rows, weights, x_smem, w_smem, full, free, count, tiles_t, N, GATED, BLOCK_T, BLOCK_N, PART, COLUMNS,
                STEPS, RANGES, PER_RANGE, PARTS, STAGES, TOGETHER,
            )),
        ],
        [4, 1],  # warps of the second group and of what fills shared memory
        [240, 24],  # registers of their threads; the first group has as many as the second one
    )  # fmt: skip


hopper_product = GluonKernel(
    hopper_product_kernel,
    "(Tensor x, Tensor weight, Tensor bias, Tensor residual, Tensor(a!) out, SymInt T) -> ()",
    warps=4,
    early=True,
)


def stages_of(block_t: int, block_n: int, written: int) -> int:
    """How many tiles of x and weights fit into shared memory in addition to ``written`` bytes."""
    return min(8, (SHARED - 1024 - written) // ((block_t + block_n) * BLOCK_K.value * 2))
