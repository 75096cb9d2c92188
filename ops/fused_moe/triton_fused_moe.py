"""Triton kernels for fused_moe: pairs of a token and an expert are sorted by expert on the device, then each tile of up
to BLOCK_T pairs of one expert is multiplied with that expert's weights, and the results of each token are added.

Launches have the same shapes whatever was chosen: there are as many tiles as the worst routing needs, and programs of
those that are empty end at once. The weights are the left operand, so that few pairs waste little of the tensor cores.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.fused_moe.op import fused_moe


@triton.jit
def count_kernel(experts_ptr, counts_ptr, P, N_PAD: tl.constexpr, BLOCK: tl.constexpr, EMULATED: tl.constexpr):
    """counts [blocks, N_PAD]: pairs of each expert in each block of pairs."""
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    n = tl.arange(0, N_PAD)
    tl.store(counts_ptr + block * N_PAD + n, _count(experts_ptr, block, P, n, N_PAD, BLOCK))


@triton.jit
def _count(experts_ptr, block, P, n, N_PAD: tl.constexpr, BLOCK: tl.constexpr):
    counts = tl.zeros([N_PAD], tl.int32)
    for first in range(0, BLOCK, 32):
        pair = block * BLOCK + first + tl.arange(0, 32)
        expert = tl.load(experts_ptr + pair, mask=pair < P, other=-1)
        counts += tl.sum((expert[None, :] == n[:, None]).to(tl.int32), axis=1)
    return counts


@triton.jit
def sort_kernel(
    experts_ptr,  # [P] int32, negative for none
    counts_ptr,  # of count_kernel, where there are several blocks
    scratch_ptr,  # [blocks + 3, N_PAD] int32
    order_ptr,  # [P] int32: pairs in the order of experts
    tiles_ptr,  # [TILES, 3] int32: expert, first place in that order, pairs
    P,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILES: tl.constexpr,
    EMULATED: tl.constexpr,
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    n = tl.arange(0, N_PAD)
    if BLOCKS == 1:
        total = _count(experts_ptr, block, P, n, N_PAD, BLOCK)
        before = tl.zeros([N_PAD], tl.int32)
    else:
        b = tl.arange(0, BLOCKS_PAD)
        counts = tl.load(counts_ptr + b[:, None] * N_PAD + n[None, :], mask=(b < BLOCKS)[:, None], other=0)
        total = tl.sum(counts, axis=0)
        before = tl.sum(tl.where((b < block)[:, None], counts, 0), axis=0)
    begin = tl.cumsum(total, axis=0) - total
    own = scratch_ptr + block * N_PAD
    tl.store(own + n, begin + before)
    if block == 0:
        tiles = tl.where(n < N, (total + BLOCK_T - 1) // BLOCK_T, 0)
        end = tl.cumsum(tiles, axis=0)
        table = scratch_ptr + BLOCKS * N_PAD
        tl.store(table + n, begin)
        tl.store(table + N_PAD + n, total)
        tl.store(table + 2 * N_PAD + n, end - tiles)
    tl.debug_barrier()
    for first in range(0, BLOCK, 32):
        pair = block * BLOCK + first + tl.arange(0, 32)
        expert = tl.load(experts_ptr + pair, mask=pair < P, other=-1)
        place = tl.load(own + expert, mask=expert >= 0, other=0, cache_modifier=".cg")
        for other in range(0, first + 32, 32):
            earlier = block * BLOCK + other + tl.arange(0, 32)
            same = tl.load(experts_ptr + earlier, mask=earlier < P, other=-1)[None, :] == expert[:, None]
            place += tl.sum((same & (earlier[None, :] < pair[:, None])).to(tl.int32), axis=1)
        tl.store(order_ptr + place, pair, mask=expert >= 0)
    if block == 0:
        for first in range(0, TILES, 32):
            i = first + tl.arange(0, 32)
            expert = tl.sum((end[None, :] <= i[:, None]).to(tl.int32), axis=1)
            there = (expert < N) & (i < TILES)
            place = tl.load(table + expert, mask=there, other=0, cache_modifier=".cg")
            pairs = tl.load(table + N_PAD + expert, mask=there, other=0, cache_modifier=".cg")
            tile = i - tl.load(table + 2 * N_PAD + expert, mask=there, other=0, cache_modifier=".cg")
            left = tl.minimum(pairs - tile * BLOCK_T, BLOCK_T)
            tl.store(tiles_ptr + i * 3, expert, mask=i < TILES)
            tl.store(tiles_ptr + i * 3 + 1, place + tile * BLOCK_T, mask=i < TILES)
            tl.store(tiles_ptr + i * 3 + 2, tl.where(there, left, 0), mask=i < TILES)


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.clamp(up, -LIMIT, LIMIT) + 1.0
        scaled = 1.702 * gate
    elif ACTIVATION == "gelu_tanh":
        scaled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        scaled = gate
    return gate / (1.0 + tl.exp(-scaled)) * up


@triton.jit
def experts_kernel(
    x_ptr,  # [T, K] of which rows are gathered, or [P, K] in the order of experts
    weight_ptr,  # [N, ROWS, K]
    bias_ptr,  # [N, ROWS]
    scale_ptr,  # [P] float32
    order_ptr,
    tiles_ptr,
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
    EMULATED: tl.constexpr,
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    tile = tl.program_id(1)
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
        out = tl.trans(_activated(gate, up, ACTIVATION, LIMIT))
        column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_row = out_ptr + place.to(tl.int64)[:, None] * (ROWS // 2)
        inside = there[:, None] & (column < ROWS // 2)[None, :]
    else:
        out = tl.trans(acc) * tl.load(scale_ptr + pair, mask=there, other=0.0)[:, None]
        column = row
        out_row = out_ptr + pair.to(tl.int64)[:, None] * ROWS
        inside = there[:, None] & in_row[None, :]
    tl.store(out_row + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_kernel(
    y_ptr, experts_ptr, out_ptr, A: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EMULATED: tl.constexpr
):
    """out [T, D]: the sum of what the experts of each token gave, y [T, A, D]."""
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        if tl.load(experts_ptr + token * A + a) >= 0:
            total += tl.load(y_ptr + (token * A + a) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


Config = Mapping[str, int]
_SORT_ALONE, _SORT_BLOCK = 512, 512  # pairs that one program sorts by itself; that each of several takes
_ADD_BLOCK = 1024
_SHARED = 227 * 1024  # bytes of shared memory that one program may use on sm_90
_TILES = (  # weight rows, inner entries, stages, warps
    (64, 128, 4, 4), (64, 256, 3, 4), (64, 64, 6, 4), (128, 64, 4, 8), (128, 128, 3, 8), (32, 256, 4, 4),
)  # fmt: skip


def configs(site: CallSite) -> list[Config]:
    """Launch constants at a site, the likely best first."""
    T, A = site.rows("x_TD"), site.args["experts_TA"].shape[1]
    N, pairs = site.args["down_NDF"].shape[0], T * A
    usual = max(16, min(128, 1 << (max(1, pairs // N) - 1).bit_length()))  # pairs of an expert, at even routing
    found: list[Config] = []
    for block_t in sorted({usual, min(128, 2 * usual)}):
        tiles = min(pairs, N + pairs // block_t)
        for block_n, block_k, stages, warps in _TILES:
            if (block_n + block_t) * block_k * 2 * stages <= _SHARED and block_n * block_t <= 64 * 32 * warps:
                found.append({"block_t": block_t, "block_n": block_n, "block_k": block_k, "stages": stages,
                              "warps": warps, "tiles": max(1, tiles), "pairs": pairs})  # fmt: skip
    return found


def _supports(site: CallSite) -> bool:
    x_TD, rest = site.args["x_TD"], ("gate_up_N2FD", "down_NDF", "gate_up_bias_N2F", "down_bias_ND")
    tensors = [t for n in rest if (t := site.args[n]) is not None]
    return (
        x_TD.dtype in (torch.bfloat16, torch.float16)
        and x_TD.stride(-1) == 1
        and all(t.dtype == x_TD.dtype and t.is_contiguous() for t in tensors)
        and all(site.args["down_NDF"].shape[i] % 8 == 0 for i in (1, 2))
        and site.args["experts_TA"].is_contiguous()
        and site.args["weights_TA"].is_contiguous()
    )


@fused_moe.impl("triton_tile", device="cuda", supports=_supports, configs=configs)
def triton_experts(
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
    order, tiles = _sorted(experts_TA, P, N, config)
    h_PF, y_PD = x_TD.new_empty((P, F)), x_TD.new_empty((P, D))
    products = (
        (x_TD, gate_up_N2FD, gate_up_bias_N2F, h_PF, {"X_ROW": x_TD.stride(0), "ROWS": 2 * F, "K": D, "GATED": True}),
        (h_PF, down_NDF, down_bias_ND, y_PD, {"X_ROW": F, "ROWS": D, "K": F, "GATED": False}),
    )
    for x, weight, bias, out, sizes in products:
        launch_triton(
            experts_kernel, (-(-sizes["ROWS"] // config["block_n"]), config["tiles"]),
            x, weight, weight if bias is None else bias, weights_TA, order, tiles, out, **sizes, A=A,
            BIAS=bias is not None, ACTIVATION=activation, LIMIT=limit, BLOCK_T=config["block_t"],
            BLOCK_N=config["block_n"], BLOCK_K=config["block_k"], EMULATED=emulated, num_warps=config["warps"],
            num_stages=config["stages"],
        )  # fmt: skip
    out_TD = x_TD.new_empty((T, D))
    launch_triton(
        add_kernel, (T, -(-D // _ADD_BLOCK)), y_PD, experts_TA, out_TD, A=A, D=D, BLOCK=_ADD_BLOCK, EMULATED=emulated,
        num_warps=4,
    )  # fmt: skip
    return out_TD


def _sorted(experts_TA: Tensor, P: int, N: int, config: Config) -> tuple[Tensor, Tensor]:
    """Pairs in the order of experts [P], and the tiles of them [tiles, 3]."""
    emulated, padded = triton.knobs.runtime.interpret, max(16, 1 << (N - 1).bit_length())
    alone = config["pairs"] <= _SORT_ALONE
    block = max(32, 1 << (config["pairs"] - 1).bit_length()) if alone else _SORT_BLOCK
    blocks = 1 if alone else -(-config["pairs"] // block)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts_TA.device)

    counts, scratch, order, tiles = (
        integers(blocks, padded),
        integers(blocks + 3, padded),
        integers(P),
        integers(config["tiles"], 3),
    )
    if blocks > 1:
        launch_triton(
            count_kernel, (blocks,), experts_TA, counts, P, N_PAD=padded, BLOCK=block, EMULATED=emulated, num_warps=4
        )
    launch_triton(
        sort_kernel, (blocks,), experts_TA, counts, scratch, order, tiles, P, N=N, N_PAD=padded, BLOCKS=blocks,
        BLOCKS_PAD=1 << (blocks - 1).bit_length(), BLOCK=block, BLOCK_T=config["block_t"], TILES=config["tiles"],
        EMULATED=emulated, num_warps=4,
    )  # fmt: skip
    return order, tiles
