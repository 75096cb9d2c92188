"""One Triton kernel for the linear layers from one attention to the next, for 2 to 64 rows of x.

Programs and counters are those of `triton_few_rows`. Here tiles of weights and of x go through shared memory, and a
program takes at least 16 rows of weights, so that x is not read from L2 by more programs than that needs; in some
layers not all programs have any then. Whoever makes a row that is normalized next writes it twice, as it is and times
the norm's weights, with the squares of its part, so that the products read it as it stands.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.fused_linear.triton_direct import arrive, await_programs
from graphllm.ops.linear_chain.op import linear_chain
from graphllm.ops.linear_chain.triton_linear_chain import Config, fetch_rows, fits, lines_of

_MOST_ROWS = 64
_LEAST = 16  # rows of weights of a program
_CONFIGS = [  # tile: rows of weights of a tile of gate_up and qkv; ahead: whether weights are fetched to L2 early
    {"tile": 64, "block_k": 128, "warps": 8, "stages": 3, "ahead": 1},
    {"tile": 64, "block_k": 128, "warps": 4, "stages": 3, "ahead": 1},
    {"tile": 64, "block_k": 128, "warps": 8, "stages": 3, "ahead": 0},
    {"tile": 64, "block_k": 64, "warps": 4, "stages": 5, "ahead": 1},
    {"tile": 32, "block_k": 256, "warps": 8, "stages": 2, "ahead": 1},
]


@triton.jit
def _product(
    weight_ptr, row, in_row, x_ptr, token, there,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T]: rows of weights times rows of x."""
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * K
    x_row = x_ptr + token[:, None] * K
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k[None, :]
        weight = tl.load(weight_row + at, mask=in_row[:, None] & (at < K), other=0.0)
        x = tl.load(x_row + at, mask=there[:, None] & (at < K), other=0.0)
        if EMULATED:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def _give(y, n, inside, at, norm_ptr, plain_ptr, weighted_ptr, squares_ptr, program, token, there, dtype: tl.constexpr,
          BLOCK_T: tl.constexpr):  # fmt: skip
    """Write a part of the rows of the residual stream, times the norm's weights as well, and its squares."""
    rounded = y.to(dtype)
    tl.store(plain_ptr + at, rounded, mask=inside)
    y = tl.where(inside, rounded.to(tl.float32), 0.0)
    norm = tl.load(norm_ptr + n, mask=tl.max(inside.to(tl.int32), axis=1) > 0, other=0.0).to(tl.float32)
    tl.store(weighted_ptr + at, (y * norm[:, None]).to(dtype), mask=inside)
    tl.store(squares_ptr + program * BLOCK_T + token, tl.sum(y * y, axis=0), mask=there)


@triton.jit
def _scale(squares_ptr, token, there, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_T: tl.constexpr,
           K: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """What products of weighted rows are multiplied by: [1, BLOCK_T]."""
    part = tl.arange(0, BLOCK_PARTS)[:, None]
    known = (part < PARTS) & there[None, :]
    squares = tl.load(squares_ptr + part * BLOCK_T + token[None, :], mask=known, other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=0) / K + EPS)[None, :]


@triton.jit
def some_rows_kernel(
    x_ptr,
    residual_ptr,
    o_ptr,
    norm_ptr,
    gate_up_ptr,
    down_ptr,
    next_norm_ptr,
    qkv_ptr,
    bias_ptr,
    middle_ptr,  # [T, D]: the residual stream between attention and the gated products
    weighted_ptr,  # [T, D]: that or the one behind the layer, times a norm's weights
    squares_ptr,  # [2, programs, BLOCK_T] float32: of these rows, by program
    gated_ptr,  # [T, F]
    out_ptr,
    projected_ptr,
    arrived_ptr,  # [2] int32, zero before and after
    last_ptr,  # [1] int32
    T,
    A: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    Q: tl.constexpr,
    EPS: tl.constexpr,
    NEXT_EPS: tl.constexpr,
    BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    O_ROWS: tl.constexpr,  # rows of the weights that a program has: of o and down, of each half of gate_up, of qkv
    PAIRS: tl.constexpr,
    QKV_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,  # all of a program's rows of o
    BLOCK_GATE: tl.constexpr,  # rows of a tile
    BLOCK_QKV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # programs that have rows of o
    BLOCK_PARTS: tl.constexpr,
    HALF_LINES: tl.constexpr,  # of the cache that a program's rows of weights fill; 0 if they are not fetched early
    DOWN_LINES: tl.constexpr,
    QKV_LINES: tl.constexpr,
    EMULATED: tl.constexpr,
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    o_row = program * O_ROWS
    o_end = tl.minimum(o_row + O_ROWS, D)
    pair = program * PAIRS
    pair_end = tl.minimum(pair + PAIRS, F)
    qkv_row = program * QKV_ROWS
    qkv_end = tl.minimum(qkv_row + QKV_ROWS, Q)
    token = tl.arange(0, BLOCK_T).to(tl.int64)
    there = token < T
    if HALF_LINES:
        fetch_rows(gate_up_ptr, pair, pair_end, D, HALF_LINES)
        fetch_rows(gate_up_ptr + F * D, pair, pair_end, D, HALF_LINES)
        fetch_rows(down_ptr, o_row, o_end, F, DOWN_LINES)
        fetch_rows(qkv_ptr, qkv_row, qkv_end, D, QKV_LINES)
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    if program == 0:
        tl.store(last_ptr, 0)

    n = o_row + tl.arange(0, BLOCK_O)
    inside = (n < o_end)[:, None] & there[None, :]
    at = token[None, :] * D + n[:, None]
    middle = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    if o_row < D:
        middle = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        middle += _product(o_ptr, n, n < o_end, x_ptr, token, there, A, BLOCK_O, BLOCK_T, BLOCK_K, EMULATED)
        _give(middle, n, inside, at, norm_ptr, middle_ptr, weighted_ptr, squares_ptr, program, token, there, dtype,
              BLOCK_T)  # fmt: skip
        middle = middle.to(dtype).to(tl.float32)
    arrive(arrived_ptr)

    if not EMULATED:
        await_programs(arrived_ptr, PROGRAMS)
    if pair < F:
        scale = _scale(squares_ptr, token, there, PARTS, BLOCK_PARTS, BLOCK_T, D, EPS)
        for i in tl.static_range(0, 2 * PAIRS, BLOCK_GATE):
            r = tl.arange(0, BLOCK_GATE)
            column = pair + i // 2 + r // 2
            y = _product(gate_up_ptr, column + (r % 2) * F, column < pair_end, weighted_ptr, token, there,
                         D, BLOCK_GATE, BLOCK_T, BLOCK_K, EMULATED)  # fmt: skip
            g, u = tl.split(tl.permute(tl.reshape(y * scale, [BLOCK_GATE // 2, 2, BLOCK_T]), (0, 2, 1)))
            f = pair + i // 2 + tl.arange(0, BLOCK_GATE // 2)
            mask = (f < pair_end)[:, None] & there[None, :]
            tl.store(gated_ptr + token[None, :] * F + f[:, None], (g / (1.0 + tl.exp(-g)) * u).to(dtype), mask=mask)
    arrive(arrived_ptr + 1)

    if not EMULATED:
        await_programs(arrived_ptr + 1, PROGRAMS)
    if program == 0:
        tl.store(arrived_ptr, 0)
    squares_ptr += PROGRAMS * BLOCK_T
    if o_row < D:
        middle += _product(down_ptr, n, n < o_end, gated_ptr, token, there, F, BLOCK_O, BLOCK_T, BLOCK_K, EMULATED)
        _give(middle, n, inside, at, next_norm_ptr, out_ptr, weighted_ptr, squares_ptr, program, token, there, dtype,
              BLOCK_T)  # fmt: skip
    arrive(last_ptr)

    if not EMULATED:
        await_programs(last_ptr, PROGRAMS)
    if program == 0:
        tl.store(arrived_ptr + 1, 0)
    if qkv_row < Q:
        scale = _scale(squares_ptr, token, there, PARTS, BLOCK_PARTS, BLOCK_T, D, NEXT_EPS)
        for i in tl.static_range(0, QKV_ROWS, BLOCK_QKV):
            q = qkv_row + i + tl.arange(0, BLOCK_QKV)
            y = _product(qkv_ptr, q, q < qkv_end, weighted_ptr, token, there, D, BLOCK_QKV, BLOCK_T, BLOCK_K, EMULATED)
            y *= scale
            if BIAS:
                y += tl.load(bias_ptr + q, mask=q < qkv_end, other=0.0).to(tl.float32)[:, None]
            mask = (q < qkv_end)[:, None] & there[None, :]
            tl.store(projected_ptr + token[None, :] * Q + q[:, None], y.to(dtype), mask=mask)


def _some_rows(site: CallSite) -> bool:
    wide = all(n % 16 == 0 for n in (*site.args["o_DA"].shape, site.args["down_DF"].shape[1]))
    return fits(site) and 1 < site.rows("x_TA") <= _MOST_ROWS and wide and site.args["x_TA"].dtype == torch.bfloat16


def _configs(site: CallSite) -> list[Config]:
    constants = {"programs": site.target.multiprocessors, "block_t": triton.next_power_of_2(max(16, site.rows("x_TA")))}
    return [{**config, **constants} for config in _CONFIGS]


@linear_chain.impl("triton_some_rows", device="cuda", supports=_some_rows, configs=_configs)
def triton_some_rows(
    x_TA: Tensor,
    residual_TD: Tensor,
    o_DA: Tensor,
    norm_D: Tensor,
    gate_up_2FD: Tensor,
    down_DF: Tensor,
    next_norm_D: Tensor,
    qkv_QD: Tensor,
    eps: float,
    next_eps: float,
    bias_Q: Tensor | None = None,
    *,
    tile: int,
    block_k: int,
    warps: int,
    stages: int,
    ahead: int,
    programs: int,
    block_t: int,
) -> tuple[Tensor, Tensor]:
    """2 to 64 rows of x, by one kernel."""
    emulated = triton.knobs.runtime.interpret
    T, (D, A), F, Q = x_TA.shape[0], o_DA.shape, down_DF.shape[1], qkv_QD.shape[0]
    programs = 1 if emulated else programs  # which run one after another there, and could not wait for each other
    o_rows = max(_LEAST, -(-D // programs))
    pairs = max(tile // 2, -(-F // programs))
    qkv_rows = max(tile, -(-Q // programs))
    parts = -(-D // o_rows)

    def lines(count: int, inner: int) -> int:
        return lines_of(count, inner, x_TA.element_size()) if ahead and not emulated else 0

    out_TD, projected_TQ = x_TA.new_empty((T, D)), x_TA.new_empty((T, Q))
    launch_triton(
        some_rows_kernel, (programs,),
        x_TA, residual_TD, o_DA, norm_D, gate_up_2FD, down_DF, next_norm_D, qkv_QD, x_TA if bias_Q is None else bias_Q,
        x_TA.new_empty((T, D)), x_TA.new_empty((T, D)), x_TA.new_empty((2, programs, block_t), dtype=torch.float32),
        x_TA.new_empty((T, F)), out_TD, projected_TQ, zeroed(x_TA, 2), x_TA.new_empty(1, dtype=torch.int32), T,
        A=A, D=D, F=F, Q=Q, EPS=eps, NEXT_EPS=next_eps, BIAS=bias_Q is not None, PROGRAMS=programs, O_ROWS=o_rows,
        PAIRS=pairs, QKV_ROWS=qkv_rows, BLOCK_T=block_t, BLOCK_O=triton.next_power_of_2(o_rows), BLOCK_GATE=tile,
        BLOCK_QKV=tile, BLOCK_K=block_k, PARTS=parts, BLOCK_PARTS=triton.next_power_of_2(parts),
        HALF_LINES=lines(pairs, D), DOWN_LINES=lines(o_rows, F), QKV_LINES=lines(qkv_rows, D), EMULATED=emulated,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_TD, projected_TQ
