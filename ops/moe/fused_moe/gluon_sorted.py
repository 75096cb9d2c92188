"""fused_moe on Hopper for many tokens and plain weights, in Gluon: four warps bring tiles of weights, and the rows of
tokens that chose an expert, into shared memory stages ahead; two groups of four warps multiply and write.

What limits the products of many tokens is how fast the second-level cache gives tiles to the multiprocessors. So a tile
has up to three blocks of 64 tokens, as many as there are registers for: one of each group, and one whose columns both
share. Tiles of few tokens have only the last kind.
"""

# mypy: allow-untyped-defs
# ruff: noqa: RUF005  (Gluon's tuples are joined by +)

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphllm.ir import CallSite, GluonKernel, runs_gluon
from graphllm.ops.gemm.fused_linear.gluon_rows import copy
from graphllm.ops.moe.fused_moe.gluon_experts import activated
from graphllm.ops.moe.fused_moe.op import fused_moe
from graphllm.ops.moe.fused_moe.operands import Experts, Residual, Route
from graphllm.ops.moe.fused_moe.triton_common import SHARED, added, supports
from graphllm.ops.moe.fused_moe.triton_order import in_order, most_tiles

BLOCK_T = gl.constexpr(64)  # tokens of a block
BLOCK_N = gl.constexpr(256)  # rows of weights of a tile
BLOCK_K = gl.constexpr(64)  # entries of a row that the TMA unit takes at once
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6


@gluon.jit
def _tile(tiles_ptr, i, count, ROWS: gl.constexpr, GATED: gl.constexpr):
    """The i-th item of work, or the last one: expert, first column, first place and pairs."""
    BLOCKS: gl.constexpr = (ROWS + BLOCK_N - 1) // BLOCK_N
    i = gl.minimum(i, count - 1)
    tile = tiles_ptr + i // BLOCKS * 3
    first = i % BLOCKS * (BLOCK_N // 2 if GATED else BLOCK_N)
    return gl.load(tile), first, gl.load(tile + 1), gl.load(tile + 2)


@triton.constexpr_function
def _prefetch(size):
    """PTX: brings ``size`` bytes from $1 on to the second-level cache, where $2 is not 0."""
    return f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], {size}; mov.b32 $0, 0; }}"


@gluon.jit
def _bring_near(weight_ptr, expert, first, step, ROWS: gl.constexpr, K: gl.constexpr, N: gl.constexpr,
                GATED: gl.constexpr, STEPS: gl.constexpr):  # fmt: skip
    """STEPS steps of the rows of a tile of weights, into the second-level cache."""
    r = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([2], [32], [4], [0]))
    row = expert * ROWS + first + r
    if GATED:
        row = expert * ROWS + first + r // 128 * 64 + r // 64 % 2 * (ROWS // 2) + r % 64
    at = row.to(gl.int64) * K + step * BLOCK_K
    there = at + STEPS * BLOCK_K <= N * ROWS * K
    gl.inline_asm_elementwise(
        _prefetch(STEPS * BLOCK_K * 2), "=r,l,r", [weight_ptr + at, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _bring_tiles(
    bring, X_ROW: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, A: gl.constexpr, FIRST: gl.constexpr,
    COPIED: gl.constexpr, GATED: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr,
    AHEAD: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    """What the warps that fill shared memory do, as far ahead as there is room. With a gate 64 rows of it and of up by
    turns, so that each half of a tile has what belongs together."""
    PART: gl.constexpr = 64 if GATED else BLOCK_N
    x_smem, w_smem, full, free, order_ptr, tiles_ptr, count, x_ptr, weights, rows, weight_ptr = bring
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout)).expand_dims(0)
    t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, layout))
    n = 0
    expert, first, begin, pairs = _tile(tiles_ptr, gl.program_id(0), count, ROWS, GATED)
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        following = _tile(tiles_ptr, i + gl.num_programs(0), count, ROWS, GATED)  # so that nobody waits for it later
        last = (pairs - 1) // BLOCK_T
        sources = ()
        for b in gl.static_range(TOKENS):
            at = begin + b * BLOCK_T + t
            if FIRST:
                at = gl.load(order_ptr + at, mask=b * BLOCK_T + t < pairs, other=0) // A
            sources = sources + ((x_ptr + at.to(gl.int64) * X_ROW).expand_dims(1) + k,)  # type: ignore[assignment]
        for step in range(K // BLOCK_K):
            stage = n % STAGES
            arrived = full.index(stage)
            if AHEAD and step % NEAR == 0:
                if step + AHEAD < K // BLOCK_K:
                    _bring_near(weight_ptr, expert, first, step + AHEAD, ROWS, K, N, GATED, NEAR)
                elif i + gl.num_programs(0) < count:
                    then = step + AHEAD - (K // BLOCK_K + NEAR - 1) // NEAR * NEAR
                    if then < K // BLOCK_K:
                        _bring_near(weight_ptr, following[0], following[1], then, ROWS, K, N, GATED, NEAR)
            mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
            if COPIED:
                mbarrier.expect(arrived, BLOCK_N * BLOCK_K * 2)
            else:
                for b in gl.static_range(TOKENS):
                    mbarrier.expect(arrived, (BLOCK_N + (b + 1) * BLOCK_T) * BLOCK_K * 2, pred=last == b)
            for p in gl.static_range(BLOCK_N // PART):
                row = expert * ROWS + first + p // 2 * PART + p % 2 * (ROWS // 2)
                to = w_smem.index(stage).slice(p * PART, PART, dim=0)
                _load_tile(weights, [row, step * BLOCK_K], arrived, to)
            for b in gl.static_range(TOKENS):
                to = x_smem.index(stage * TOKENS + b)
                if COPIED:
                    there = (b * BLOCK_T + t < pairs).expand_dims(1)
                    copy(to, sources[b] + step * BLOCK_K, mask=there.broadcast_to([BLOCK_T, BLOCK_K]))
                else:
                    _load_tile(rows, [begin + b * BLOCK_T, step * BLOCK_K], arrived, to, pred=b <= last)
            if COPIED:
                async_copy.mbarrier_arrive(arrived, increment_count=False)
            n += 1
        expert, first, begin, pairs = following


@gluon.jit
def _sums(
    x_smem, w_smem, full, free, n, whole, shared,
    K: gl.constexpr, COPIED: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    WHOLE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """A group's products of the block ``whole`` with all rows of a tile of weights and, or, of the block ``shared``
    with its half of them. The first step is in the n-th stage."""
    HALF: gl.constexpr = BLOCK_N // 2
    acc = gl.zeros([BLOCK_T, BLOCK_N if WHOLE else 1], gl.float32, layout=_sums_layout(BLOCK_N))
    part = gl.zeros([BLOCK_T, HALF if SHARED else 1], gl.float32, layout=_sums_layout(HALF))
    for step in range(K // BLOCK_K):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        if COPIED:
            hopper.fence_async_shared()
        w = w_smem.index(stage)
        if WHOLE:
            acc = hopper.warpgroup_mma(x_smem.index(stage * TOKENS + whole), w.permute((1, 0)), acc, is_async=True)
        if SHARED:
            own = w.slice(GROUP * HALF, HALF, dim=0).permute((1, 0))
            part = hopper.warpgroup_mma(x_smem.index(stage * TOKENS + shared), own, part, is_async=True)
        if WHOLE and SHARED:
            acc, part = hopper.warpgroup_mma_wait(2, deps=[acc, part])
        elif WHOLE:
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        else:
            part = hopper.warpgroup_mma_wait(1, deps=[part])
        mbarrier.arrive(free.index((n + STAGES - 1) % STAGES), count=1, pred=step > 0)
        n += 1
    if WHOLE:
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    if SHARED:
        part = hopper.warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(free.index((n + STAGES - 1) % STAGES), count=1)
    return acc, part


@triton.constexpr_function
def _wide(columns):
    """64 rows of a product, 8 neighbouring columns a thread: each has numbers of no other warp's product."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((columns // 32).bit_length() - 1))]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@triton.constexpr_function
def _sums_layout(columns):
    """64 rows of sums by four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _places(begin, pairs, order_ptr, scale_ptr, FIRST: gl.constexpr, GATED: gl.constexpr, COLUMNS: gl.constexpr):
    """Of a block's rows the places in the result, and factors: read before the products, which last longer."""
    row = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, _wide(COLUMNS // 2 if GATED else COLUMNS)))
    place = begin + row
    scale = 1.0
    if not FIRST:
        place = gl.load(order_ptr + place, mask=row < pairs, other=0)
        r = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, _sums_layout(COLUMNS)))
        pair = gl.load(order_ptr + begin + r, mask=r < pairs, other=0)
        scale = gl.load(scale_ptr + pair, mask=r < pairs, other=0.0)
    return place, scale, pairs


@gluon.jit
def _write(
    acc, rows, expert, first, bias_ptr, out_ptr,
    ROWS: gl.constexpr, FIRST: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
):  # fmt: skip
    """A block of sums [64, columns of weights] becomes that of the rows of `_places`."""
    COLUMNS: gl.constexpr = acc.shape[1] // 2 if GATED else acc.shape[1]
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    sums: gl.constexpr = acc.type.layout
    wide: gl.constexpr = _wide(COLUMNS)
    place, scale, pairs = rows
    row = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, wide))
    column = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, wide))
    if BIAS:
        c = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, sums))
        at = first + c
        if GATED:
            at = first + c // 128 * 64 + c % 64
        up = c // 64 % 2 * WIDTH if GATED else 0
        bias = gl.load(bias_ptr + expert * ROWS + at + up, mask=at < WIDTH, other=0.0)
        acc += bias.to(gl.float32).expand_dims(0)
    if GATED:
        parts = acc.reshape([BLOCK_T, COLUMNS // 64, 2, 64]).permute((0, 1, 3, 2))
        gate, up = parts.split()
        out = activated(gate, up, ACTIVATION, LIMIT).reshape([BLOCK_T, COLUMNS])
    elif FIRST:
        out = gl.maximum(acc, 0.0)
        out = out * out
    else:
        out = acc * scale.expand_dims(1)
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), wide)
    to = out_ptr + (place.to(gl.int64) * WIDTH).expand_dims(1) + column.expand_dims(0)
    gl.store(to, out, mask=(row < pairs).expand_dims(1) & (column < WIDTH).expand_dims(0))


@gluon.jit
def _multiply(
    work, ROWS: gl.constexpr, K: gl.constexpr, FIRST: gl.constexpr, COPIED: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: of each tile one block alone if there are two or three, and its half of the last
    one if there are one or three."""
    x_smem, w_smem, full, free, order_ptr, tiles_ptr, count, bias_ptr, scale_ptr, out_ptr = work
    HALF: gl.constexpr = BLOCK_N // 2
    n = 0
    expert, first, begin, pairs = _tile(tiles_ptr, gl.program_id(0), count, ROWS, GATED)
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        following = _tile(tiles_ptr, i + gl.num_programs(0), count, ROWS, GATED)
        last = (pairs - 1) // BLOCK_T
        half = first + GROUP * (HALF // 2 if GATED else HALF)
        if TOKENS > 1:
            own = begin + GROUP * BLOCK_T
            if last == 1:
                rows = _places(own, pairs - GROUP * BLOCK_T, order_ptr, scale_ptr, FIRST, GATED, BLOCK_N)
                acc, _ = _sums(
                    x_smem, w_smem, full, free, n, GROUP, last, K, COPIED, TOKENS, STAGES, GROUP, True, False
                )  # fmt: skip
                _write(acc, rows, expert, first, bias_ptr, out_ptr, ROWS, FIRST, GATED, BIAS, ACTIVATION, LIMIT)
            if TOKENS > 2 and last == 2:
                rows = _places(own, BLOCK_T, order_ptr, scale_ptr, FIRST, GATED, BLOCK_N)
                others = begin + 2 * BLOCK_T
                more = _places(others, pairs - 2 * BLOCK_T, order_ptr, scale_ptr, FIRST, GATED, HALF)
                acc, part = _sums(
                    x_smem, w_smem, full, free, n, GROUP, last, K, COPIED, TOKENS, STAGES, GROUP, True, True
                )  # fmt: skip
                _write(acc, rows, expert, first, bias_ptr, out_ptr, ROWS, FIRST, GATED, BIAS, ACTIVATION, LIMIT)
                _write(part, more, expert, half, bias_ptr, out_ptr, ROWS, FIRST, GATED, BIAS, ACTIVATION, LIMIT)
        if last == 0:
            rows = _places(begin, pairs, order_ptr, scale_ptr, FIRST, GATED, HALF)
            _, part = _sums(x_smem, w_smem, full, free, n, 0, 0, K, COPIED, TOKENS, STAGES, GROUP, False, True)
            _write(part, rows, expert, half, bias_ptr, out_ptr, ROWS, FIRST, GATED, BIAS, ACTIVATION, LIMIT)
        n += K // BLOCK_K
        expert, first, begin, pairs = following


@gluon.jit
def hopper_sorted_kernel(
    x_ptr,  # [T, K], rows are gathered, or [P, K] in the order of experts
    weight_ptr,  # [N, ROWS, K]
    bias_ptr,  # [N, ROWS]
    scale_ptr,  # [P] float32, by pair
    order_ptr,  # [P] int32: pairs by place
    tiles_ptr,  # [TILES + 1, 3] int32, as `Order` says
    counts_ptr,  # what is to be zero again, COUNTS of them
    out_ptr,  # [P, ROWS / 2], or [P, ROWS] without a gate, in the order of experts, or [P, ROWS] by pair
    P, X_ROW: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, N: gl.constexpr, A: gl.constexpr, BIAS: gl.constexpr,
    FIRST: gl.constexpr,  # of the two products: with an activation, from tokens; else scaled
    COPIED: gl.constexpr,  # rows of x come by copies of the threads, not by the TMA unit, which gathers none
    GATED: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, TILES: gl.constexpr, COUNTS: gl.constexpr,
    TOKENS: gl.constexpr,  # blocks of a tile: 1, 2 or 3
    STAGES: gl.constexpr, AHEAD: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    # In this order: see the kernel of `gluon_product`, which writes descriptors before it waits.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    if COUNTS and gl.program_id(0) == 0:
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        gl.store(counts_ptr + gl.arange(0, COUNTS, layout=flat), gl.zeros([COUNTS], gl.int32, layout=flat))
    weights = tma.make_tensor_descriptor(
        weight_ptr, [N * ROWS, K], [K, 1], [64 if GATED else BLOCK_N, BLOCK_K], swizzled
    )
    rows = weights
    if not COPIED:
        rows = tma.make_tensor_descriptor(x_ptr, [P, K], [X_ROW, 1], [BLOCK_T, BLOCK_K], swizzled)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * TOKENS, BLOCK_T, BLOCK_K], swizzled)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if COPIED else 1)  # every thread that copies, and the weights
        mbarrier.init(free.index(i), count=2)
    hopper.fence_async_shared()
    count = gl.load(tiles_ptr + TILES * 3) * ((ROWS + BLOCK_N - 1) // BLOCK_N)
    work = (x_smem, w_smem, full, free, order_ptr, tiles_ptr, count, bias_ptr, scale_ptr, out_ptr)
    bring = (x_smem, w_smem, full, free, order_ptr, tiles_ptr, count, x_ptr, weights, rows, weight_ptr)
    gl.warp_specialize(
        [
            (_multiply, (work, ROWS, K, FIRST, COPIED, GATED, BIAS, ACTIVATION, LIMIT, TOKENS, STAGES, 0)),
            (_multiply, (work, ROWS, K, FIRST, COPIED, GATED, BIAS, ACTIVATION, LIMIT, TOKENS, STAGES, 1)),
            (_bring_tiles, (bring, X_ROW, ROWS, K, A, FIRST, COPIED, GATED, TOKENS, STAGES, N, AHEAD, NEAR)),
        ],
        [4, 4],  # warps of the second group and of what fills shared memory
        [224, 56],  # registers of their threads; the first group has as many as the second one
    )


hopper_sorted = GluonKernel(
    hopper_sorted_kernel,
    "(Tensor x, Tensor weight, Tensor bias, Tensor scale, Tensor order, Tensor tiles, Tensor(b!) counts,"
    " Tensor(a!) out, SymInt P) -> ()",
    warps=4,
    early=True,
)

Config = Mapping[str, int]
_FEWEST = 33  # tokens


def supports_sorted(site: CallSite) -> bool:
    """Whether weights are what the kernel reads, and tokens many."""
    D, F = site.struct(Experts).sizes[1:]
    x_TD, plain = site.args["x_TD"], site.args["form"] == "" and site.args["adapter_ids_T"] is None
    fits = all(n % BLOCK_K.value == 0 for n in (D, F)) and x_TD.stride(0) % 8 == 0
    halves = x_TD.dtype in (torch.bfloat16, torch.float16)
    tensors = (t for t in site.args.values() if isinstance(t, Tensor))
    aligned = all(t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)
    many = site.rows("x_TD") >= _FEWEST
    return many and plain and fits and halves and aligned and runs_gluon(site.target) and supports(site)


def sorted_configs(site: CallSite) -> list[Config]:
    """One block of tokens in a tile, or three."""
    pairs, N = site.rows("x_TD") * site.args["experts_TA"].shape[1], site.args["down_NDF"].shape[0]
    return [_config(site, pairs, N, tokens) for tokens in (1, 3)]


def _config(site: CallSite, pairs: int, N: int, tokens: int) -> Config:
    block_t = tokens * BLOCK_T.value
    return {
        "tokens": tokens, "block_t": block_t, "pairs": pairs, "tiles": most_tiles(pairs, N, block_t),
        "stages": (SHARED - 8192) // ((block_t + BLOCK_N.value) * BLOCK_K.value * 2),
        "programs": site.target.multiprocessors,
    }  # fmt: skip


@fused_moe.impl("gluon_sorted", device="cuda", supports=supports_sorted, configs=sorted_configs)
def gluon_sorted(x_TD: Tensor, experts: Experts, route: Route, residual: Residual | None, **config: int) -> Tensor:
    """h and what each expert gives are rounded to x's dtype."""
    weights_TA, experts_TA = route
    (T, A), (N, D, F) = experts_TA.shape, experts.sizes
    P = T * A
    order, tiles, counts = in_order(experts_TA, P, N, config)
    h_PF, y_PD = x_TD.new_empty((P, F)), x_TD.new_empty((P, D))
    for i, (x, weight, out) in enumerate(zip((x_TD, h_PF), experts.weights, (h_PF, y_PD), strict=True)):
        bias, cleared = experts.biases[i], None if i else counts
        hopper_sorted(
            config["programs"], x, weight, x if bias is None else bias, weights_TA, order, tiles,
            tiles if cleared is None else cleared, out, P, X_ROW=x.stride(0), ROWS=weight.shape[1], K=weight.shape[2],
            N=N, A=A, BIAS=bias is not None, FIRST=i == 0, COPIED=i == 0 or bool(config.get("copied")),
            GATED=i == 0 and experts.parts == 2, ACTIVATION=experts.activation, LIMIT=experts.limit,
            TILES=config["tiles"], COUNTS=0 if cleared is None else cleared.shape[0], TOKENS=config["tokens"],
            STAGES=config["stages"], AHEAD=config.get("ahead", 0), NEAR=config.get("near", 4),
        )  # fmt: skip
    return added(y_PD, experts_TA, residual)
