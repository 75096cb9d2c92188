"""Triton kernels for fused_moe with many tokens: pairs of a token and an expert are brought into the order of experts
on the device, then each tile of up to BLOCK_T pairs of one expert is multiplied with that expert's weights.

Launches have the same shapes whatever was chosen: there are as many tiles as the worst routing needs, and programs of
those that are empty end at once. In which order the pairs of one expert lie depends on the run; what is computed for
each of them does not. The weights are the left operand, so that few pairs waste little of the tensor cores.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.fused_moe.op import fused_moe
from graphllm.ops.fused_moe.triton_common import activated, added, supports


@triton.jit
def count_kernel(
    experts_ptr,  # [P] int32, negative for none
    counts_ptr,  # [2, N_PAD] of zeros, to the first row of which the pairs of each expert are added
    P,
    N_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATED: tl.constexpr,
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    counts = _counts(experts_ptr, tl.program_id(0) * BLOCK, P, N_PAD, BLOCK)
    tl.atomic_add(counts_ptr + tl.arange(0, N_PAD), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _counts(experts_ptr, begin, P, N_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """[N_PAD]: how many of BLOCK pairs each expert has."""
    pair = begin + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pair, mask=pair < P, other=-1)
    none = tl.sum((expert < 0).to(tl.int32), axis=0)  # counted with expert 0
    return tl.histogram(tl.maximum(expert, 0), N_PAD) - tl.where(tl.arange(0, N_PAD) == 0, none, 0)


@triton.jit
def place_kernel(
    experts_ptr,  # [P]
    counts_ptr,  # [2, N_PAD]: the pairs of each expert, and zeros, to which the places are added that programs take
    scratch_ptr,  # [BLOCKS, N_PAD]
    order_ptr,  # [P] int32: pairs in the order of experts
    tiles_ptr,  # [TILES, 3] int32: expert, first place in that order, pairs
    P,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILES: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """The first BLOCKS programs place pairs, each of the others writes BLOCK tiles."""
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    n = tl.arange(0, N_PAD)
    total = tl.load(counts_ptr + n)
    begin = tl.cumsum(total, axis=0) - total
    if block < BLOCKS:
        counts = _counts(experts_ptr, block * BLOCK, P, N_PAD, BLOCK)
        before = tl.atomic_add(counts_ptr + N_PAD + n, counts, mask=counts > 0, sem="relaxed")
        own = scratch_ptr + block * N_PAD
        tl.store(own + n, begin + before, mask=counts > 0)
        tl.debug_barrier()
        pair = block * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(experts_ptr + pair, mask=pair < P, other=-1)
        place = tl.load(own + expert, mask=expert >= 0, other=0, cache_modifier=".cg")
        for first in range(0, BLOCK, 32):
            earlier = block * BLOCK + first + tl.arange(0, 32)
            same = tl.load(experts_ptr + earlier, mask=earlier < P, other=-1)[None, :] == expert[:, None]
            place += tl.sum((same & (earlier[None, :] < pair[:, None])).to(tl.int32), axis=1)
        tl.store(order_ptr + place, pair, mask=expert >= 0)
    else:
        tiles = tl.where(n < N, (total + BLOCK_T - 1) // BLOCK_T, 0)
        last = tl.cumsum(tiles, axis=0)
        for first in range(0, BLOCK, 32):
            i = (block - BLOCKS) * BLOCK + first + tl.arange(0, 32)
            at = tl.sum((last[None, :] <= i[:, None]).to(tl.int32), axis=1)  # N_PAD behind the last
            of = (n[None, :] == at[:, None]).to(tl.int32)
            skipped = (i - tl.sum(of * (last - tiles)[None, :], axis=1)) * BLOCK_T
            pairs = tl.minimum(tl.sum(of * total[None, :], axis=1) - skipped, BLOCK_T)
            tl.store(tiles_ptr + i * 3, at, mask=i < TILES)
            tl.store(tiles_ptr + i * 3 + 1, tl.sum(of * begin[None, :], axis=1) + skipped, mask=i < TILES)
            tl.store(tiles_ptr + i * 3 + 2, tl.where(at < N, pairs, 0), mask=i < TILES)


@triton.jit
def experts_kernel(
    x_ptr,  # [T, K] of which rows are gathered, or [P, K] in the order of experts
    weight_ptr,  # [N, ROWS, K]
    bias_ptr,  # [N, ROWS]
    scale_ptr,  # [P] float32
    order_ptr,
    tiles_ptr,
    counts_ptr,  # what place_kernel counted with
    out_ptr,  # [P, ROWS / 2] in the order of experts, or [P, ROWS] by pair
    X_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    A: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,  # the first of the two products: with an activation, from tokens; else scaled
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COUNTS: tl.constexpr,
    EMULATED: tl.constexpr,
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    tile = tl.program_id(1)
    if GATED and block + tile == 0:
        tl.store(counts_ptr + tl.arange(0, COUNTS), tl.zeros([COUNTS], tl.int32))
    pairs = tl.load(tiles_ptr + tile * 3 + 2)
    if pairs == 0:
        return
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    place = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_T)
    there = tl.arange(0, BLOCK_T) < pairs
    pair = tl.load(order_ptr + place, mask=there, other=0)
    r = tl.arange(0, BLOCK_N)
    if GATED:  # rows of the gate and of up by turns
        column = block * (BLOCK_N // 2) + r // 2
        row, in_row = column + (r % 2) * (ROWS // 2), column < ROWS // 2
    else:
        row = block * BLOCK_N + r
        in_row = row < ROWS
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + (expert * ROWS + row)[:, None] * K
    from_row = pair // A if GATED else place
    x_row = x_ptr + from_row.to(tl.int64)[:, None] * X_ROW
    EVEN: tl.constexpr = K % BLOCK_K == 0
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k
        if EVEN:
            weight = tl.load(weight_row + at[None, :], mask=in_row[:, None], other=0.0)
            x = tl.load(x_row + at[None, :], mask=there[:, None], other=0.0)
        else:
            weight = tl.load(weight_row + at[None, :], mask=in_row[:, None] & (at < K)[None, :], other=0.0)
            x = tl.load(x_row + at[None, :], mask=there[:, None] & (at < K)[None, :], other=0.0)
        if EMULATED:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + expert * ROWS + row, mask=in_row, other=0.0).to(tl.float32)[:, None]
    if GATED:
        halves = tl.permute(tl.reshape(acc, [BLOCK_N // 2, 2, BLOCK_T]), (0, 2, 1))
        gate, up = tl.split(halves)
        out = tl.trans(activated(gate, up, ACTIVATION, LIMIT))
        column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_row = out_ptr + place.to(tl.int64)[:, None] * (ROWS // 2)
        inside = there[:, None] & (column < ROWS // 2)[None, :]
    else:
        out = tl.trans(acc) * tl.load(scale_ptr + pair, mask=there, other=0.0)[:, None]
        column = row
        out_row = out_ptr + pair.to(tl.int64)[:, None] * ROWS
        inside = there[:, None] & in_row[None, :]
    tl.store(out_row + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


Config = Mapping[str, int]
_FEWEST = 32  # tokens up to which nobody need sort
_COUNT_BLOCK, _PLACE_BLOCK = 1024, 128  # pairs of a program
_SHARED = 227 * 1024  # bytes of shared memory that one program may use on sm_90
_TILES = (  # weight rows, inner entries, stages, warps
    (64, 128, 3, 4), (128, 64, 3, 4), (128, 64, 4, 8), (256, 64, 3, 8), (64, 64, 6, 4), (128, 64, 3, 8),
    (256, 64, 4, 8),
)  # fmt: skip


def configs(site: CallSite) -> list[Config]:
    """Launch constants at a site, the likely best first."""
    T, A = site.rows("x_TD"), site.args["experts_TA"].shape[1]
    N, pairs = site.args["down_NDF"].shape[0], T * A
    usual = max(16, min(128, 1 << (max(1, pairs // N) - 1).bit_length()))  # pairs of an expert, at even routing
    found: list[Config] = []
    for block_t in sorted({usual, min(256, 2 * usual)}):
        tiles = min(pairs, N + pairs // block_t)
        for block_n, block_k, stages, warps in _TILES:
            if (block_n + block_t) * block_k * 2 * stages <= _SHARED and block_n * block_t <= 64 * 32 * warps:
                found.append({"block_t": block_t, "block_n": block_n, "block_k": block_k, "stages": stages,
                              "warps": warps, "tiles": max(1, tiles), "pairs": pairs})  # fmt: skip
    return found


@fused_moe.impl(
    "triton_sorted", device="cuda", supports=lambda s: s.rows("x_TD") > _FEWEST and supports(s), configs=configs
)
def triton_sorted(
    x_TD: Tensor,
    gate_up_N2FD: Tensor,
    down_NDF: Tensor,
    weights_TA: Tensor,
    experts_TA: Tensor,
    activation: str = "silu",
    limit: float = 0.0,
    gate_up_bias_N2F: Tensor | None = None,
    down_bias_ND: Tensor | None = None,
    **config: int,
) -> Tensor:
    """h and what each expert gives are rounded to x's dtype."""
    T, A = experts_TA.shape
    N, D, F = down_NDF.shape
    P, emulated = T * A, triton.knobs.runtime.interpret
    order, tiles, counts = _sorted(experts_TA, P, N, config)
    h_PF, y_PD = x_TD.new_empty((P, F)), x_TD.new_empty((P, D))
    products = (
        (x_TD, gate_up_N2FD, gate_up_bias_N2F, h_PF, {"X_ROW": x_TD.stride(0), "ROWS": 2 * F, "K": D, "GATED": True}),
        (h_PF, down_NDF, down_bias_ND, y_PD, {"X_ROW": F, "ROWS": D, "K": F, "GATED": False}),
    )
    for x, weight, bias, out, sizes in products:
        launch_triton(
            experts_kernel, (-(-sizes["ROWS"] // config["block_n"]), config["tiles"]),
            x, weight, weight if bias is None else bias, weights_TA, order, tiles, counts, out, **sizes, A=A,
            BIAS=bias is not None, ACTIVATION=activation, LIMIT=limit, BLOCK_T=config["block_t"],
            BLOCK_N=config["block_n"], BLOCK_K=config["block_k"], COUNTS=counts.shape[0], EMULATED=emulated,
            num_warps=config["warps"], num_stages=config["stages"],
        )  # fmt: skip
    return added(y_PD, experts_TA)


def _sorted(experts_TA: Tensor, P: int, N: int, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs in the order of experts [P], the tiles of them [tiles, 3], and scratch that the first product must leave as
    zeros."""
    emulated, padded = triton.knobs.runtime.interpret, max(32, 1 << (N - 1).bit_length())
    blocks = -(-config["pairs"] // _PLACE_BLOCK)
    counts = zeroed(experts_TA, 2 * padded)
    scratch, order, tiles = (experts_TA.new_empty(shape) for shape in ((blocks, padded), (P,), (config["tiles"], 3)))
    launch_triton(
        count_kernel, (-(-config["pairs"] // _COUNT_BLOCK),), experts_TA, counts, P, N_PAD=padded, BLOCK=_COUNT_BLOCK,
        EMULATED=emulated, num_warps=4,
    )  # fmt: skip
    launch_triton(
        place_kernel, (blocks + -(-config["tiles"] // _PLACE_BLOCK),), experts_TA, counts, scratch, order,
        tiles, P, N=N, N_PAD=padded, BLOCKS=blocks, BLOCK=_PLACE_BLOCK, BLOCK_T=config["block_t"],
        TILES=config["tiles"], EMULATED=emulated, num_warps=4,
    )  # fmt: skip
    return order, tiles, counts
