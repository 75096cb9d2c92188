"""Triton kernels for fused_moe with few tokens, bound by the weights of the chosen experts, which are read once.

For one token, programs multiply whole rows of its experts' weights, and the second product adds its experts up. For up
to 64, each program takes all tokens and some weight rows of one expert, finds the tokens that chose it in the table of
choices, and ends at once where there are none: nothing is sorted. The weights are the left operand, so that few tokens
waste little of the tensor cores; what an expert does not compute is masked.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.gemm.fused_linear.triton_direct import direct_product
from graphllm.ops.gemm.fused_linear.triton_encoded import encoded_product, tiles_of
from graphllm.ops.gemm.fused_linear.triton_fused_linear import weight_rows
from graphllm.ops.moe.fused_moe.op import fused_moe
from graphllm.ops.moe.fused_moe.operands import ExpertLora, Experts, Residual, Route
from graphllm.ops.moe.fused_moe.triton_adapters import lora_constants, plus_low_rank, shrink_pairs
from graphllm.ops.moe.fused_moe.triton_common import (
    activated,
    added,
    has_gate,
    pairs_in_slots,
    pairs_of,
    problem,
    programs_at_once,
    squared,
    supports,
    write_pairs,
)
from graphllm.ops.moe.fused_moe.triton_float8 import launch_halves, supports_halves
from graphllm.ops.moe.fused_moe.triton_one_encoded import launch_one


@triton.jit
def one_hidden_kernel(
    x_ptr,  # [D]
    weight_ptr,  # [N, PARTS * F, D]
    bias_ptr,  # [N, PARTS * F]
    experts_ptr,  # [A]
    norm_ptr,  # [D]
    h_ptr,  # [A, F]
    EPS: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    block = tl.program_id(0)
    a = tl.program_id(1)
    expert = tl.load(experts_ptr + a).to(tl.int64)
    if expert < 0:
        return
    PARTS: tl.constexpr = 2 if has_gate(True, ACTIVATION) else 1
    r = tl.arange(0, BLOCK_N)  # rows of the gate and of up by turns, or of up
    f = block * (BLOCK_N // PARTS) + r // PARTS
    row = expert * (PARTS * F) + f + (r % PARTS) * F
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, D, BLOCK_K):
        inside = start + k < D
        weight = tl.load(
            weight_ptr + row[:, None] * D + (start + k)[None, :], mask=(f < F)[:, None] & inside[None, :], other=0.0
        )
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
    out = tl.sum(acc, axis=1)
    if NORM:
        out *= tl.rsqrt(tl.sum(squares, axis=0) / D + EPS)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=f < F, other=0.0).to(tl.float32)
    if PARTS == 2:
        gate, up = tl.split(tl.reshape(out, [BLOCK_N // 2, 2]))
        h = activated(gate, up, ACTIVATION, LIMIT)
    else:
        h = squared(out)
    column = block * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
    tl.store(h_ptr + a * F + column, h.to(h_ptr.dtype.element_ty), mask=column < F)


@triton.jit
def one_sum_kernel(
    h_ptr,  # [A, F]
    weight_ptr,  # [N, D, F]
    bias_ptr,  # [N, D]
    scale_ptr,  # [A] float32
    experts_ptr,  # [A]
    residual_ptr,  # [D]
    out_ptr,  # [D]
    RESIDUAL: tl.constexpr, D: tl.constexpr, F: tl.constexpr, A: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    for a in tl.static_range(A):
        expert = tl.load(experts_ptr + a).to(tl.int64)
        scale = tl.load(scale_ptr + a)
        row = tl.maximum(expert, 0) * D + d
        for start in tl.static_range(0, F, BLOCK_K):
            inside = start + k < F
            weight = tl.load(
                weight_ptr + row[:, None] * F + (start + k)[None, :], mask=(d < D)[:, None] & inside[None, :], other=0.0
            )
            h = tl.load(h_ptr + a * F + start + k, mask=inside, other=0.0).to(tl.float32) * scale
            acc += weight.to(tl.float32) * tl.where(expert >= 0, h, 0.0)[None, :]
        if BIAS:
            bias = tl.load(bias_ptr + row, mask=d < D, other=0.0).to(tl.float32)
            biases += tl.where(expert >= 0, bias * scale, 0.0)
    out = tl.sum(acc, axis=1) + biases
    if RESIDUAL:
        out += tl.load(residual_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize_on_alignment=["T"])
def few_kernel(
    x_ptr,  # [T, K], or [P, K] by pair of a token and an expert
    weight_ptr,  # [N, ROWS, K], or encoded
    scales_ptr,  # of encoded weights [N, GROUPS, ROWS]
    zeros_ptr,
    bias_ptr,  # [N, ROWS]
    scale_ptr,  # [P] float32
    experts_ptr,  # [T, A]
    ids_ptr,  # of adapters [T]
    low_ptr,  # [P, RANK], for each of the gate and up; x @ A.T
    lora_b_ptr,  # [L, N, RANK, ROWS]
    out_ptr,  # [P, ROWS / 2], or [P, ROWS]
    T, X_ROW: tl.constexpr, WEIGHT_ROW: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, A: tl.constexpr, A_PAD: tl.constexpr,
    BIAS: tl.constexpr,
    FIRST: tl.constexpr,  # of the two products: with an activation, from tokens; else scaled
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    BY_PAIR: tl.constexpr,  # programs are for pairs, where these are fewer than experts; else for experts
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,  # of encoded weights
    BLOCK_S: tl.constexpr,  # tokens of an expert that are multiplied at a time, with weights read into registers; or 0
    WARPS: tl.constexpr,
    RANK: tl.constexpr,  # of adapters, 0 without
    BLOCK_R: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    block = tl.program_id(0)
    expert = tl.program_id(1)
    if BY_PAIR:
        expert = tl.load(experts_ptr + tl.program_id(1))
    t = tl.arange(0, BLOCK_T)
    pair = pairs_of(experts_ptr, expert, T, A, A_PAD, BLOCK_T)
    there = pair >= 0
    if BY_PAIR:  # the first pair of an expert works for all of them
        first = tl.min(tl.where(there, pair, T * A), axis=0)
        if (first != tl.program_id(1)) | (expert < 0):
            return
    elif tl.max(pair, axis=0) < 0:
        return
    GATED: tl.constexpr = has_gate(FIRST, ACTIVATION)
    row, in_row = weight_rows(block, ROWS, GATED, BLOCK_N)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + expert * ROWS + row, mask=in_row, other=0.0).to(tl.float32)
    weight_index = expert.to(tl.int64) * ROWS + row
    scale = expert.to(tl.int64) * (GROUPS * ROWS) + row
    if BLOCK_S:
        rank = tl.cumsum(there.to(tl.int32), axis=0)
        for start in range(0, tl.max(rank, axis=0), BLOCK_S):
            of_slot = pairs_in_slots(pair, rank, start, BLOCK_S)
            from_row = of_slot // A if FIRST else of_slot
            acc = direct_product(
                weight_ptr, weight_index, in_row, scales_ptr + scale, zeros_ptr + scale, x_ptr, from_row.to(tl.int64),
                of_slot >= 0, x_ptr, X_ROW, WEIGHT_ROW, ROWS, K, FORM, GROUP, ZEROS, False, BLOCK_N, BLOCK_S, BLOCK_K,
                WARPS, 2, False, EMULATED,
            )  # fmt: skip
            write_pairs(
                acc + bias[:, None], of_slot, block, scale_ptr, out_ptr, ROWS, FIRST, ACTIVATION, LIMIT, BLOCK_N,
                BLOCK_S,
            )  # fmt: skip
        return
    x_row = x_ptr + (t if FIRST else pair)[:, None] * X_ROW
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + weight_index[:, None] * WEIGHT_ROW
    EVEN: tl.constexpr = K % (BLOCK_K if FORM == "" else SPAN) == 0
    if FORM != "":
        acc = encoded_product(
            weight_row, scales_ptr + scale, zeros_ptr + scale, in_row, x_row, there, 0, tiles_of(K, BLOCK_K, SPAN),
            ROWS, K, FORM, GROUP, ZEROS, SPAN, BLOCK_N, BLOCK_T, BLOCK_K, EVEN and ROWS % BLOCK_N == 0, EMULATED,
        )  # fmt: skip
    else:
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
    if RANK:
        for p in tl.static_range(2 if GATED else 1):
            of_part = in_row & (tl.arange(0, BLOCK_N) % 2 == p) if GATED else in_row
            acc = plus_low_rank(
                acc, pair, ids_ptr, low_ptr + p * RANK, lora_b_ptr, expert, row, of_part, A, N, ROWS, RANK,
                2 * RANK if GATED else RANK, BLOCK_R, EMULATED,
            )  # fmt: skip
    write_pairs(acc + bias[:, None], pair, block, scale_ptr, out_ptr, ROWS, FIRST, ACTIVATION, LIMIT, BLOCK_N, BLOCK_T)


Config = Mapping[str, int]
_MOST_TOKENS = 64
_ONE = (  # rows, inner entries and warps of the first product, then of the second
    (8, 2048, 8, 4, 512, 2), (16, 1024, 8, 2, 512, 1), (4, 2048, 4, 4, 512, 8), (16, 512, 4, 8, 512, 8),
    (4, 1024, 4, 2, 512, 2), (8, 2048, 4, 2, 512, 2), (4, 1024, 4, 2, 1024, 4), (8, 1024, 4, 1, 256, 2),
    (4, 512, 4, 2, 512, 4), (8, 512, 4, 4, 512, 4),
)  # fmt: skip
_FEW = (  # weight rows, inner entries, stages, warps
    (64, 128, 3, 4), (64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 4, 4), (64, 64, 4, 4),
)  # fmt: skip
_ENCODED_FEW = (  # weight rows, tiles of a span, stages, warps
    (128, 1, 3, 4), (128, 1, 4, 4), (64, 1, 4, 4), (64, 1, 3, 4), (128, 2, 4, 4),
)  # fmt: skip
_DIRECT = ((16, 8, 4), (16, 8, 8))  # weight rows, tokens, warps
_ONE_ENCODED = ((16, 4, 2), (16, 4, 4), (16, 4, 6), (16, 2, 4), (16, 8, 3))  # for one token: weight rows, warps, steps
_HALVES = ((64, 64, 3), (128, 64, 3), (128, 128, 3))  # in float8: weight rows of each of the two products, stages
_MOST_DIRECT = 2  # tokens, in an expert's product on registers: with more, tiles in shared memory are faster


def supports_one(site: CallSite) -> bool:
    plain = site.args["form"] == "" and site.args["adapter_ids_T"] is None
    return site.rows("x_TD") == 1 and plain and supports(site, norm=True)


def configs_of_one(site: CallSite) -> list[Config]:
    return [dict(zip(("n1", "k1", "w1", "n2", "k2", "w2"), numbers, strict=True)) for numbers in _ONE]


@fused_moe.impl("triton_one", device="cuda", supports=supports_one, configs=configs_of_one)
def triton_one(x_TD: Tensor, experts: Experts, route: Route, residual: Residual | None, **config: int) -> Tensor:
    """For one token. h is rounded to x's dtype, the normalized row is not."""
    weights_TA, experts_TA = route
    residual_TD, norm_D, eps = residual or (None, None, 0.0)
    A, (_, D, F) = experts_TA.shape[1], experts.sizes
    emulated, (first, second) = triton.knobs.runtime.interpret, experts.biases
    h_AF, out_TD = x_TD.new_empty((A, F)), x_TD.new_empty(x_TD.shape)
    launch_triton(
        one_hidden_kernel, (-(-experts.parts * F // config["n1"]), A), x_TD, experts.gate_up_N2FD,
        experts.gate_up_N2FD if first is None else first, experts_TA, x_TD if norm_D is None else norm_D, h_AF, EPS=eps,
        NORM=norm_D is not None, D=D, F=F, BIAS=first is not None, ACTIVATION=experts.activation, LIMIT=experts.limit,
        BLOCK_N=config["n1"], BLOCK_K=config["k1"], EMULATED=emulated, num_warps=config["w1"],
    )  # fmt: skip
    launch_triton(
        one_sum_kernel, (-(-D // config["n2"]),), h_AF, experts.down_NDF,
        experts.down_NDF if second is None else second, weights_TA, experts_TA,
        h_AF if residual_TD is None else residual_TD, out_TD,
        RESIDUAL=residual_TD is not None, D=D, F=F, A=A, BIAS=second is not None, BLOCK_N=config["n2"],
        BLOCK_K=config["k2"], EMULATED=emulated, num_warps=config["w2"],
    )  # fmt: skip
    return out_TD


def supports_few(site: CallSite) -> bool:
    return site.rows("x_TD") <= _MOST_TOKENS and supports(site)


def configs_of_few(site: CallSite) -> list[Config]:
    block_t = max(16, 1 << (max(1, site.rows("x_TD")) - 1).bit_length())
    # The inner entries of encoded tiles are their format's, whole spans or halves.
    form, rows, plain = site.args["form"], site.rows("x_TD"), site.args["adapter_ids_T"] is None
    common = {"block_t": block_t, "block_k": 0, "parts": 1, "block_s": 0, "stages": 1, "one": 0, "ahead": 2,
              "halves": 0}  # fmt: skip  # else: weight rows of the second product in float8
    found: list[Config] = []
    if form and rows == 1 and plain:
        one = {**common, "one": 1}
        found += [{**one, "block_n": n, "warps": warps, "ahead": ahead} for n, warps, ahead in _ONE_ENCODED]
    elif form and rows <= _MOST_DIRECT and plain:  # adapters need tiles of at least 16 tokens
        found += [{**common, "block_n": n, "block_s": tokens, "warps": warps} for n, tokens, warps in _DIRECT]
    for n, inner, stages, warps in _ENCODED_FEW if form else _FEW:
        if programs_at_once(site, n, block_t, 256 // inner if form else inner, stages):
            which = {"parts": inner} if form else {"block_k": inner}
            found.append({**common, **which, "block_n": n, "stages": stages, "warps": warps})
    if rows > _MOST_DIRECT and supports_halves(site):
        found += [{**common, "halves": more, "block_n": n, "stages": s, "warps": 4} for n, more, s in _HALVES]
    return found


@fused_moe.impl("triton_few", device="cuda", supports=supports_few, configs=configs_of_few, remedy=problem)
def triton_few(
    x_TD: Tensor, experts: Experts, route: Route, lora: ExpertLora | None, residual: Residual | None, **config: int
) -> Tensor:
    """For up to 64 tokens. h and what each expert gives are rounded to x's dtype."""
    weights_TA, experts_TA = route
    T, A = experts_TA.shape
    N, D, F = experts.sizes
    h_PF, y_PD = x_TD.new_empty((T * A, F)), x_TD.new_empty((T * A, D))
    products = (
        (x_TD, experts.gate_up_N2FD, h_PF, {"X_ROW": x_TD.stride(0), "ROWS": experts.parts * F, "K": D, "FIRST": True}),
        (h_PF, experts.down_NDF, y_PD, {"X_ROW": F, "ROWS": D, "K": F, "FIRST": False}),
    )
    for i, (x, weight, out, sizes) in enumerate(products):
        if config["one"]:
            launch_one(i, x, out, experts, route, config["block_n"], config["warps"], config["ahead"])
            continue
        if config["halves"]:
            rows = (config["block_n"], config["halves"])[i]
            launch_halves(i, x, out, experts, route, config["block_t"], rows, config["stages"])
            continue
        bias, tables = experts.biases[i], (x, x, x)
        if lora is not None:
            low = shrink_pairs(lora, i, x, experts_TA, int(sizes["X_ROW"]))
            tables = lora.adapter_ids_T, low, lora.b[i]
        encoding = experts.encoding(i, int(sizes["K"]))
        constants = {
            "BLOCK_K": encoding["SPAN"] // config["parts"] or config["block_k"], **sizes, **encoding,
            **lora_constants(lora), "N": N, "A": A, "A_PAD": 1 << (A - 1).bit_length(),
            "BY_PAIR": T * A < N, "BIAS": bias is not None,
            "ACTIVATION": experts.activation, "LIMIT": experts.limit, "BLOCK_T": config["block_t"],
            "BLOCK_N": config["block_n"], "BLOCK_S": config["block_s"], "WARPS": config["warps"],
            "EMULATED": triton.knobs.runtime.interpret, "num_warps": config["warps"], "num_stages": config["stages"],
        }  # fmt: skip
        launch_triton(
            few_kernel, (-(-int(sizes["ROWS"]) // config["block_n"]), min(N, T * A)), x, weight,
            *(weight if t is None else t for t in (experts.scales[i], experts.zeros[i])), x if bias is None else bias,
            weights_TA, experts_TA, *tables, out, T, **constants,
        )  # fmt: skip
    return added(y_PD, experts_TA, residual)
