"""Triton: products of one token with the encoded weights of its experts, read from memory into registers.

Every program knows its pair of the token and an expert just by its number, so it asks for weights as soon as it has
read the expert's: with so few reads to a program, looking the pair up would take as long as the product.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.gemm.fused_linear.triton_direct import direct_product
from graphllm.ops.gemm.fused_linear.triton_fused_linear import weight_rows
from graphllm.ops.moe.fused_moe.operands import Experts, Route
from graphllm.ops.moe.fused_moe.triton_common import has_gate, write_pairs

_SLOTS = 8  # columns of a product; the token has one


@triton.jit
def one_pair_kernel(
    x_ptr,  # [K], or [A, K]
    weight_ptr,  # [N, ROWS, WEIGHT_ROW]
    scales_ptr,  # [N, GROUPS, ROWS]
    zeros_ptr,
    bias_ptr,  # [N, ROWS]
    scale_ptr,  # [A] float32
    experts_ptr,  # [A]
    out_ptr,  # [A, ROWS / 2], or [A, ROWS]
    WEIGHT_ROW: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr,  # of the two products: with an activation, of the token; else scaled
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    block = tl.program_id(0)
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    row, in_row = weight_rows(block, ROWS, has_gate(FIRST, ACTIVATION), BLOCK_N)
    slot = tl.arange(0, SLOTS)
    x_row = (slot * 0 + (0 if FIRST else pair)).to(tl.int64)
    scale = expert * (GROUPS * ROWS) + row
    acc = direct_product(
        weight_ptr, expert * ROWS + row, in_row, scales_ptr + scale, zeros_ptr + scale, x_ptr, x_row, slot == 0, x_ptr,
        K, WEIGHT_ROW, ROWS, K, FORM, GROUP, ZEROS, False, BLOCK_N, SLOTS, SPAN, WARPS, AHEAD, False,
        EMULATED,
    )  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + expert * ROWS + row, mask=in_row, other=0.0).to(tl.float32)[:, None]
    pairs = tl.where(slot == 0, pair, -1)
    write_pairs(acc, pairs, block, scale_ptr, out_ptr, ROWS, FIRST, ACTIVATION, LIMIT, BLOCK_N, SLOTS)


def launch_one(
    i: int, x: Tensor, out: Tensor, experts: Experts, route: Route, block_n: int, warps: int, ahead: int
) -> None:
    """The first or second product of one token: x [1, D] into ``out`` [A, F], or x [A, F] into [A, D]."""
    weight, bias = experts.weights[i], experts.biases[i]
    rows = weight.shape[1]
    launch_triton(
        one_pair_kernel, (-(-rows // block_n), route.experts_TA.shape[1]), x, weight,
        *(weight if t is None else t for t in (experts.scales[i], experts.zeros[i])), x if bias is None else bias,
        *route, out, **experts.encoding(i, x.shape[1]), ROWS=rows, K=x.shape[1], BIAS=bias is not None,
        FIRST=i == 0, ACTIVATION=experts.activation, LIMIT=experts.limit, BLOCK_N=block_n, SLOTS=_SLOTS, WARPS=warps,
        AHEAD=ahead, EMULATED=triton.knobs.runtime.interpret, num_warps=warps,
    )  # fmt: skip
