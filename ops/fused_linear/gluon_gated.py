"""Gated products of more rows of x than a tile of `triton_fused_linear` serves well, on Hopper in Gluon: a warp brings
tiles of x and of the weights into shared memory stages ahead, and two groups of four warps multiply and write.

What it saves beside the library's product is the gate, which needs no kernel of its own, and the start: weights, and
what the TMA unit must know of them, are asked for while the kernel before this one still runs. So the memory in which
that is described must not be the last such kernel's: see `launch_dependents` below. Without a gate, or in parts of
sums, it was slower than the library's in most sizes (bench/results/h200_decode.md).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphllm.ir import CallSite, GluonKernel
from graphllm.ops.fused_linear.launch_constants import SHARED, Config, read_by_tma
from graphllm.ops.fused_linear.op import MOST_ROWS, fused_linear
from graphllm.ops.fused_linear.triton_fused_linear import normalized, plain

_FEWEST_ROWS = 33  # below, tiles of Triton's kernel read the weights as fast
_SUMS = 128 * 256  # numbers of a tile that two groups of four warps have registers for
_BLOCK_K = gl.constexpr(64)  # entries of a row that the TMA unit takes at once
_CANDIDATES = 3
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6


@gluon.jit
def _place(i, tiles_t, COLUMNS: gl.constexpr, TOGETHER: gl.constexpr):
    """The i-th tile's tile of tokens, and of columns. Programs of one moment share both."""
    first = i // (TOGETHER * COLUMNS) * TOGETHER
    size = gl.minimum(tiles_t - first, TOGETHER)
    within = i % (TOGETHER * COLUMNS)
    return first + within % size, within // size


@gluon.jit
def _gated(gate, value):
    """silu(gate) * value."""
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp(-gate)], dtype=gl.float32, is_pure=True, pack=1
    )
    return gate * inverse * value


@gluon.jit
def _load_weights(
    weights, tile, column, k, arrived, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, PART: gl.constexpr
):  # fmt: skip
    """Ask for the k-th entries of a tile's columns: of the gate and of the value in turn, PART of each."""
    for b in gl.static_range(BLOCK_N // PART):
        first = column * (BLOCK_N // 2) + b // 2 * PART + b % 2 * WIDTH
        _load_tile(weights, [first, k * _BLOCK_K], arrived, tile.slice(b * PART, PART, dim=0))


@gluon.jit
def _bring_tiles(
    rows, weights, x_smem, w_smem, full, free, count, tiles_t,
    WIDTH: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, PART: gl.constexpr, COLUMNS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """What the warp that fills shared memory does, as far ahead as there is room. The first stages' weights are there
    before it waits for x."""
    EARLY: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    _, column = _place(gl.program_id(0), tiles_t, COLUMNS, TOGETHER)
    early = gl.where(gl.program_id(0) < count, EARLY, 0)
    for stage in range(early):
        mbarrier.expect(full.index(stage), (BLOCK_T + BLOCK_N) * _BLOCK_K * 2)
        _load_weights(weights, w_smem.index(stage), column, stage, full.index(stage), WIDTH, BLOCK_N, PART)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    n = 0
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        t, column = _place(i, tiles_t, COLUMNS, TOGETHER)
        for k in range(STEPS):
            stage = n % STAGES
            arrived = full.index(stage)
            mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
            if n >= early:
                mbarrier.expect(arrived, (BLOCK_T + BLOCK_N) * _BLOCK_K * 2)
                _load_weights(weights, w_smem.index(stage), column, k, arrived, WIDTH, BLOCK_N, PART)
            _load_tile(rows, [t * BLOCK_T, k * _BLOCK_K], arrived, x_smem.index(stage))
            n += 1


@gluon.jit
def _multiply(
    x_smem, w_smem, full, free, bias_ptr, out_ptr, count, tiles_t, T,
    WIDTH: gl.constexpr, BIAS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: half of each tile's tokens or, where these are too few, of its columns."""
    SIDES: gl.constexpr = 2 if BLOCK_T == 64 else 1
    OWN_T: gl.constexpr = BLOCK_T * SIDES // 2
    OWN_N: gl.constexpr = BLOCK_N // SIDES
    WRITTEN: gl.constexpr = OWN_N // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_N, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WRITTEN, WRITTEN // 8], [4, 1], [1, 0])
    # The next kernel may start when all programs are here, so the one before is over: two kernels at most overlap.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    n = 0
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        t, column = _place(i, tiles_t, COLUMNS, TOGETHER)
        acc = gl.zeros([OWN_T, OWN_N], gl.float32, layout=mma)
        for k in range(STEPS):
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
        row = t * BLOCK_T
        first = column * (BLOCK_N // 2)
        if SIDES == 1:
            row += GROUP * OWN_T
        else:
            first += GROUP * WRITTEN
        if BIAS:
            c = gl.arange(0, OWN_N, layout=gl.SliceLayout(0, mma))
            at = first + c % WRITTEN
            bias = gl.load(bias_ptr + at + c // WRITTEN * WIDTH, mask=at < WIDTH, other=0.0)
            acc += bias.to(gl.float32).expand_dims(0)
        gate, value = acc.reshape([OWN_T, 2, WRITTEN]).permute((0, 2, 1)).split()
        out = gl.convert_layout(_gated(gate, value).to(out_ptr.dtype.element_ty), wide)
        r = row + gl.arange(0, OWN_T, layout=gl.SliceLayout(1, wide))
        c = first + gl.arange(0, WRITTEN, layout=gl.SliceLayout(0, wide))
        inside = (r < T).expand_dims(1) & (c < WIDTH).expand_dims(0)
        gl.store(out_ptr + (r.to(gl.int64) * WIDTH).expand_dims(1) + c.expand_dims(0), out, mask=inside)


@gluon.jit
def hopper_gated_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [2 * WIDTH, K]: of the gate, then of the value
    bias_ptr,  # [2 * WIDTH]
    out_ptr,  # [T, WIDTH]
    T,
    X_ROW: gl.constexpr, WEIGHT_ROW: gl.constexpr, WIDTH: gl.constexpr, K: gl.constexpr, BIAS: gl.constexpr,
    BLOCK_T: gl.constexpr,  # tokens of a tile
    BLOCK_N: gl.constexpr,  # columns of a tile, half of them of the gate
    STAGES: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = BLOCK_N // (4 if BLOCK_T == 64 else 2)  # a group's columns of the gate
    COLUMNS: gl.constexpr = (2 * WIDTH + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + _BLOCK_K - 1) // _BLOCK_K
    TOGETHER: gl.constexpr = 16  # tiles of tokens that are multiplied with the same columns one after another
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    tiles_t = (T + BLOCK_T - 1) // BLOCK_T
    count = tiles_t * COLUMNS
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    rows = tma.make_tensor_descriptor(x_ptr, [T, K], [X_ROW, 1], [BLOCK_T, _BLOCK_K], swizzled)
    weights = tma.make_tensor_descriptor(weight_ptr, [2 * WIDTH, K], [WEIGHT_ROW, 1], [PART, _BLOCK_K], swizzled)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, _BLOCK_K], swizzled)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, _BLOCK_K], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, w_smem, full, free, bias_ptr, out_ptr, count, tiles_t, T, WIDTH, BIAS, BLOCK_T, BLOCK_N,
                COLUMNS, STEPS, STAGES, TOGETHER, 0,
            )),
            (_multiply, (
                x_smem, w_smem, full, free, bias_ptr, out_ptr, count, tiles_t, T, WIDTH, BIAS, BLOCK_T, BLOCK_N,
                COLUMNS, STEPS, STAGES, TOGETHER, 1,
            )),
            (_bring_tiles, (
                rows, weights, x_smem, w_smem, full, free, count, tiles_t, WIDTH, BLOCK_T, BLOCK_N, PART, COLUMNS,
                STEPS, STAGES, TOGETHER,
            )),
        ],
        [4, 1],  # warps of the second group and of what fills shared memory
        [240, 24],  # registers of their threads; the first group has as many as the second one
    )  # fmt: skip


hopper_gated = GluonKernel(
    hopper_gated_kernel,
    "(Tensor x, Tensor weight, Tensor bias, Tensor(a!) out, SymInt T) -> ()",
    warps=4,
    early=True,
)


def _serves(site: CallSite) -> bool:
    return read_by_tma(site) and plain(site) and site.rows("x_TI") >= _FEWEST_ROWS


def _configs(site: CallSite) -> list[Config]:
    """Launch constants, the likely best first: of those with which most multiprocessors have work the largest tiles."""
    rows, processors = site.rows("x_TI"), site.target.multiprocessors
    if rows > MOST_ROWS:
        return [_config(site, 128, 256)]
    found = []
    for block_t in (64,) if rows <= 64 else (128,) if rows <= 128 else (128, 256):
        for block_n in (256, 128, 64):
            tiles = -(-site.args["weight_OI"].shape[0] // block_n) * -(-rows // block_t)
            idle = tiles / (-(-tiles // processors) * processors) < 0.6
            if block_t * block_n <= _SUMS and block_t + block_n > 128:
                found.append((idle, -block_t * block_n, block_t, block_n))
    return [_config(site, block_t, block_n) for _, _, block_t, block_n in sorted(found)[:_CANDIDATES]]


def _config(site: CallSite, block_t: int, block_n: int) -> Config:
    written = block_t * block_n // 2  # bytes by which a tile's rows are put together
    stages = min(8, (SHARED - 1024 - written) // ((block_t + block_n) * _BLOCK_K.value * 2))
    return {"block_t": block_t, "block_n": block_n, "stages": stages, "programs": site.target.multiprocessors}


@fused_linear.impl("gluon_gated", device="cuda", supports=_serves, configs=_configs)
def gluon_gated(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    *,
    block_t: int,
    block_n: int,
    stages: int,
    programs: int,
) -> Tensor:
    """Sums, bias and gate in float32, then rounded."""
    if norm_I is not None:
        x_TI = normalized(x_TI, norm_I, eps)
    (T, K), width = x_TI.shape, weight_OI.shape[0] // 2
    out_TN = x_TI.new_empty((T, width))
    hopper_gated(
        programs, x_TI, weight_OI, x_TI if bias_O is None else bias_O, out_TN, T, X_ROW=x_TI.stride(0),
        WEIGHT_ROW=weight_OI.stride(0), WIDTH=width, K=K, BIAS=bias_O is not None, BLOCK_T=block_t, BLOCK_N=block_n,
        STAGES=stages,
    )  # fmt: skip
    return out_TN
