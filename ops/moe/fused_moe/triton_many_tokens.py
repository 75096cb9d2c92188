"""Triton kernels for fused_moe with many tokens: pairs of a token and an expert are brought into the order of experts,
then each tile of up to BLOCK_T pairs of one expert is multiplied with that expert's weights.

As many programs as run at once take one tile after the other. In which order the pairs of one expert lie changes
nothing of what is computed for each of them. The weights are the left operand, so that few pairs waste little of the
tensor cores.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.gemm.fused_linear.triton_encoded import encoded_product, tiles_of
from graphllm.ops.moe.fused_moe.op import fused_moe
from graphllm.ops.moe.fused_moe.operands import ExpertLora, Experts, Residual, Route
from graphllm.ops.moe.fused_moe.triton_adapters import lora_constants, plus_low_rank, shrink_tiles
from graphllm.ops.moe.fused_moe.triton_common import (
    activated,
    added,
    has_gate,
    problem,
    programs_at_once,
    squared,
    supports,
)
from graphllm.ops.moe.fused_moe.triton_order import in_order, most_tiles


@triton.jit(do_not_specialize_on_alignment=["P"])
def experts_kernel(
    x_ptr,  # [T, K], rows are gathered, or [P, K] in the order of experts
    weight_ptr,  # [N, ROWS, K], or encoded
    scales_ptr,  # of encoded weights [N, GROUPS, ROWS]
    zeros_ptr,
    bias_ptr,  # [N, ROWS]
    scale_ptr,  # [P] float32
    order_ptr, tiles_ptr,
    counts_ptr,  # what is to be zero again, COUNTS of them
    ids_ptr,  # of adapters [T]
    low_ptr,  # [P, RANK] by pair, for each of the gate and up; x @ A.T
    lora_b_ptr,  # [L, N, RANK, ROWS]
    out_ptr,  # [P, ROWS / 2], or [P, ROWS] without a gate, in the order of experts, or [P, ROWS] by pair
    P, X_ROW: tl.constexpr, WEIGHT_ROW: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, A: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr,  # of the two products: with an activation, from tokens; else scaled
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,  # of encoded weights
    TILES: tl.constexpr, COUNTS: tl.constexpr, PROGRAMS: tl.constexpr,
    RANK: tl.constexpr,  # of adapters, 0 without
    BLOCK_R: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Programs take one block after the other, so that each has its weights' descriptor once."""
    # In this order: see the kernel of `gluon_product`, which writes descriptors before it waits.
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    GATED: tl.constexpr = has_gate(FIRST, ACTIVATION)
    HALF: tl.constexpr = BLOCK_N // 2
    BLOCKS: tl.constexpr = (ROWS + BLOCK_N - 1) // BLOCK_N
    # Two blocks of rows: of the gate and of up, or neighbours.
    OTHER: tl.constexpr = ROWS // 2 if GATED else HALF
    STEP: tl.constexpr = HALF if GATED else BLOCK_N
    WIDTH: tl.constexpr = ROWS // 2 if GATED else ROWS
    LOW_ROW: tl.constexpr = 2 * RANK if GATED else RANK
    if COUNTS and tl.program_id(0) == 0:
        tl.store(counts_ptr + tl.arange(0, COUNTS), tl.zeros([COUNTS], tl.int32))
    if FORM == "":
        weights = tl.make_tensor_descriptor(weight_ptr, [N * ROWS, K], [K, 1], [HALF, BLOCK_K])
    if FORM == "" and not FIRST:
        rows = tl.make_tensor_descriptor(x_ptr, [P, K], [X_ROW, 1], [BLOCK_T, BLOCK_K])
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    for i in tl.range(tl.program_id(0), tl.load(tiles_ptr + TILES * 3) * BLOCKS, PROGRAMS):
        tile = tiles_ptr + i // BLOCKS * 3
        expert = tl.load(tile)
        begin = tl.load(tile + 1)
        there = t < tl.load(tile + 2)
        first = i % BLOCKS * STEP
        row = expert * ROWS + first
        pair = tl.load(order_ptr + begin + t, mask=there, other=0)
        if FIRST:
            x_row = x_ptr + (pair // A).to(tl.int64)[:, None] * X_ROW
        if FORM != "":
            r = tl.arange(0, BLOCK_N)  # rows of the two blocks by turns
            place = first + r // 2 + r % 2 * OTHER
            in_row = (first + r // 2 < WIDTH) & (place < ROWS)
            weight_row = weight_ptr + (expert.to(tl.int64) * ROWS + place)[:, None] * WEIGHT_ROW
            of = expert.to(tl.int64) * (GROUPS * ROWS) + place
            if not FIRST:
                x_row = x_ptr + (begin + t).to(tl.int64)[:, None] * X_ROW
            both = encoded_product(
                weight_row, scales_ptr + of, zeros_ptr + of, in_row, x_row, there, 0, tiles_of(K, BLOCK_K, SPAN),
                ROWS, K, FORM, GROUP, ZEROS, SPAN, BLOCK_N, BLOCK_T, BLOCK_K, K % SPAN == 0 and WIDTH % BLOCK_N == 0,
                EMULATED,
            )  # fmt: skip
            acc, other = tl.split(tl.permute(tl.reshape(both, [HALF, 2, BLOCK_T]), (0, 2, 1)))
        else:
            acc = tl.zeros([HALF, BLOCK_T], tl.float32)
            other = tl.zeros([HALF, BLOCK_T], tl.float32)
            for start in range(0, K, BLOCK_K):
                weight = weights.load([row, start])
                more = weights.load([row + OTHER, start])
                if FIRST:
                    at = start + k
                    x = tl.load(x_row + at[None, :], mask=there[:, None] & (at < K)[None, :], other=0.0)
                else:
                    x = rows.load([begin, start])
                if EMULATED:
                    weight, more, x = weight.to(tl.float32), more.to(tl.float32), x.to(tl.float32)
                acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
                other = tl.dot(more, tl.trans(x), other, input_precision="ieee")
        column = first + tl.arange(0, HALF)
        if BIAS:
            bias = bias_ptr + expert * ROWS + column
            acc += tl.load(bias, mask=column < WIDTH, other=0.0).to(tl.float32)[:, None]
            other += tl.load(bias + OTHER, mask=column + OTHER < ROWS, other=0.0).to(tl.float32)[:, None]
        if RANK:
            low_of_other = low_ptr + RANK if GATED else low_ptr
            of_pair = tl.where(there, pair, -1)
            acc = plus_low_rank(
                acc, of_pair, ids_ptr, low_ptr, lora_b_ptr, expert, column, column < WIDTH, A, N, ROWS, RANK, LOW_ROW,
                BLOCK_R, EMULATED,
            )  # fmt: skip
            other = plus_low_rank(
                other, of_pair, ids_ptr, low_of_other, lora_b_ptr, expert, column + OTHER,
                (column < WIDTH) & (column + OTHER < ROWS), A, N, ROWS, RANK, LOW_ROW, BLOCK_R, EMULATED,
            )  # fmt: skip
        if GATED:
            out = tl.trans(activated(acc, other, ACTIVATION, LIMIT))
            to = out_ptr + (begin + t).to(tl.int64)[:, None] * WIDTH + column[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & (column < WIDTH)[None, :])
        else:
            if FIRST:
                one, two, out_row = tl.trans(squared(acc)), tl.trans(squared(other)), begin + t
            else:
                scale = tl.load(scale_ptr + pair, mask=there, other=0.0)[:, None]
                one, two, out_row = tl.trans(acc) * scale, tl.trans(other) * scale, pair
            to = out_ptr + out_row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            inside = there[:, None] & (column < WIDTH)[None, :]
            tl.store(to, one.to(out_ptr.dtype.element_ty), mask=inside)
            inside = there[:, None] & (column + HALF < WIDTH)[None, :]
            tl.store(to + HALF, two.to(out_ptr.dtype.element_ty), mask=inside)


Config = Mapping[str, int]
_FEWEST = 32  # tokens up to which nobody need sort
# Weight rows, inner entries, stages, warps and the most programs on a multiprocessor, for each of the two products.
_TILES = (
    ((128, 64, 4, 4, 2), (128, 64, 4, 4, 2)), ((64, 128, 3, 4, 3), (128, 64, 3, 4, 4)),
    ((128, 64, 3, 4, 4), (128, 64, 3, 4, 4)), ((64, 64, 4, 4, 4), (64, 64, 4, 4, 4)),
    ((128, 64, 3, 8, 2), (128, 64, 3, 4, 2)), ((256, 64, 4, 8, 1), (128, 64, 3, 4, 2)),
    ((256, 64, 4, 8, 1), (256, 64, 4, 8, 1)),
)  # fmt: skip


_ENCODED_TILES = tuple(  # with the inner entries of tiles of whole spans, or of halves
    ((n, inner, stages, warps, 4),) * 2
    for n, inner, stages, warps in (
        (64, 256, 3, 4), (64, 256, 4, 4), (64, 128, 4, 4), (128, 256, 3, 8), (128, 128, 3, 4), (128, 256, 3, 4),
    )
)  # fmt: skip


def configs(site: CallSite) -> list[Config]:
    """Launch constants at a site, the likely best last where there are many pairs of an expert."""
    T, A = site.rows("x_TD"), site.args["experts_TA"].shape[1]
    N, pairs = site.args["down_NDF"].shape[0], T * A
    usual = max(16, min(128, 1 << (max(1, pairs // N) - 1).bit_length()))  # pairs of an expert, at even routing
    found: list[Config] = []
    for block_t in sorted({usual, min(128, 2 * usual)}):
        tiles = most_tiles(pairs, N, block_t)
        for products in _ENCODED_TILES if site.args["form"] else _TILES:
            parts = 256 // products[0][1] if site.args["form"] else 1
            config = {"block_t": block_t, "tiles": tiles, "pairs": pairs, "parts": parts}
            for i, (n, k, stages, warps, most) in enumerate(products):
                programs = min(most, programs_at_once(site, n, block_t, k, stages)) * site.target.multiprocessors
                config |= {f"n{i}": n, f"k{i}": k, f"stages{i}": stages, f"warps{i}": warps, f"programs{i}": programs}
            if config["programs0"] and config["programs1"] and config not in found:
                found.append(config)
    return found


def supports_many(site: CallSite) -> bool:
    return site.rows("x_TD") > _FEWEST and supports(site)


@fused_moe.impl("triton_sorted", device="cuda", supports=supports_many, configs=configs, remedy=problem)
def triton_sorted(
    x_TD: Tensor, experts: Experts, route: Route, lora: ExpertLora | None, residual: Residual | None, **config: int
) -> Tensor:
    """h and what each expert gives are rounded to x's dtype."""
    weights_TA, experts_TA = route
    T, A = experts_TA.shape
    N, D, F = experts.sizes
    P, emulated = T * A, triton.knobs.runtime.interpret
    order, tiles, counts = in_order(experts_TA, P, N, config)
    h_PF, y_PD = x_TD.new_empty((P, F)), x_TD.new_empty((P, D))
    products = (
        (x_TD, experts.gate_up_N2FD, h_PF, {"X_ROW": x_TD.stride(0), "ROWS": experts.parts * F, "K": D, "FIRST": True}),
        (h_PF, experts.down_NDF, y_PD, {"X_ROW": F, "ROWS": D, "K": F, "FIRST": False}),
    )
    for i, (x, weight, out, sizes) in enumerate(products):
        bias, tables = experts.biases[i], (x, x, x)
        if lora is not None:
            low = shrink_tiles(lora, i, x, experts_TA, int(sizes["X_ROW"]), order, tiles, config)
            tables = lora.adapter_ids_T, low, lora.b[i]
        encoding = experts.encoding(i, int(sizes["K"]))
        constants = {
            "BLOCK_K": encoding["SPAN"] // config["parts"] or config[f"k{i}"], **sizes, **encoding,
            **lora_constants(lora), "N": N, "A": A, "BIAS": bias is not None, "ACTIVATION": experts.activation,
            "LIMIT": experts.limit, "BLOCK_T": config["block_t"], "BLOCK_N": config[f"n{i}"], "TILES": config["tiles"],
            "COUNTS": 0 if i or counts is None else counts.shape[0], "PROGRAMS": config[f"programs{i}"],
            "EMULATED": emulated, "num_warps": config[f"warps{i}"], "num_stages": config[f"stages{i}"],
        }  # fmt: skip
        launch_triton(
            experts_kernel, (config[f"programs{i}"],), x, weight,
            *(weight if t is None else t for t in (experts.scales[i], experts.zeros[i])), x if bias is None else bias,
            weights_TA, order, tiles, tiles if counts is None else counts, *tables, out, P, **constants,
        )  # fmt: skip
    return added(y_PD, experts_TA, residual)
