"""One Triton kernel for the linear layers from one attention to the next, for 2 to 16 rows of x.

As `triton_linear_chain` for one row, with tensor cores (`triton_direct`). Rows are too many to be read again and again
until nothing is missing, so a program that has written its part of them says so by a counter, and waits for all others
once it has asked for its first weights of the next layer. A counter is zero again when all have passed the next one;
the last one, which nobody passes, begins with what is left of the launch before.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.fused_linear.triton_direct import arrive, direct_product
from graphllm.ops.linear_chain.op import linear_chain
from graphllm.ops.linear_chain.triton_linear_chain import Config, fetch_rows, fits, lines_of

_MOST_ROWS = 16
_MOST_O_ROWS = 32  # of a program, whose share of them each warp has in its registers
_CONFIGS = [  # tile: most rows of weights of a tile; ahead: whether weights are fetched to L2 before the kernel waits
    {"tile": 64, "warps": 8, "ahead": 1},
    {"tile": 64, "warps": 8, "ahead": 0},
    {"tile": 32, "warps": 8, "ahead": 1},
    {"tile": 64, "warps": 16, "ahead": 1},
]
_SPANS = (256, 128, 64, 32)  # inner entries that a warp takes at once


@triton.jit
def _product(
    weight_ptr, row, in_row, x_ptr, token, there, norm_ptr, arrived_ptr,
    K: tl.constexpr, NORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, SPAN: tl.constexpr,
    WARPS: tl.constexpr, WAIT: tl.constexpr, PROGRAMS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T]: rows of weights times rows of x, which the kernel before or all programs of this one make."""
    return direct_product(
        weight_ptr, row.to(tl.int64), in_row, weight_ptr + row, weight_ptr + row, x_ptr, token, there, norm_ptr,
        K, K, 0, K, "", 0, False, NORM, BLOCK_N, BLOCK_T, SPAN, WARPS, 4, WAIT, EMULATED, arrived_ptr, PROGRAMS,
    )  # fmt: skip


@triton.jit
def _scale(x_ptr, token, there, K: tl.constexpr, BLOCK_K: tl.constexpr, EPS: tl.constexpr):
    """What products of the rows of x with a norm's weights are multiplied by: [1, BLOCK_T]."""
    k = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + token[:, None] * K + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) / K + EPS)[None, :]


@triton.jit
def few_rows_kernel(
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
    BLOCK_D: tl.constexpr,  # D, up to a power of two
    SPAN_A: tl.constexpr,
    SPAN_D: tl.constexpr,
    SPAN_F: tl.constexpr,
    HALF_LINES: tl.constexpr,  # of the cache that a program's rows of weights fill; 0 if they are not fetched early
    DOWN_LINES: tl.constexpr,
    QKV_LINES: tl.constexpr,
    WARPS: tl.constexpr,
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

    n = o_row + tl.arange(0, BLOCK_O)
    own = (n < o_end)[:, None] & there[None, :]
    at = token[None, :] * D + n[:, None]
    y = _product(o_ptr, n, n < o_end, x_ptr, token, there, norm_ptr, arrived_ptr,
                 A, False, BLOCK_O, BLOCK_T, SPAN_A, WARPS, True, 0, EMULATED)  # fmt: skip
    middle = (y + tl.load(residual_ptr + at, mask=own, other=0.0).to(tl.float32)).to(dtype)
    tl.store(middle_ptr + at, middle, mask=own)
    if program == 0:
        tl.store(last_ptr, 0)
    arrive(arrived_ptr)

    scale = tl.zeros([1, BLOCK_T], tl.float32)
    for i in tl.static_range(0, 2 * PAIRS, BLOCK_GATE):
        r = tl.arange(0, BLOCK_GATE)
        column = pair + i // 2 + r // 2
        y = _product(gate_up_ptr, column + (r % 2) * F, column < pair_end, middle_ptr, token, there, norm_ptr,
                     arrived_ptr, D, True, BLOCK_GATE, BLOCK_T, SPAN_D, WARPS, False, PROGRAMS if i == 0 else 0,
                     EMULATED)  # fmt: skip
        if i == 0:
            scale = _scale(middle_ptr, token, there, D, BLOCK_D, EPS)
        g, u = tl.split(tl.permute(tl.reshape(y * scale, [BLOCK_GATE // 2, 2, BLOCK_T]), (0, 2, 1)))
        f = pair + i // 2 + tl.arange(0, BLOCK_GATE // 2)
        inside = (f < pair_end)[:, None] & there[None, :]
        tl.store(gated_ptr + token[None, :] * F + f[:, None], (g / (1.0 + tl.exp(-g)) * u).to(dtype), mask=inside)
    arrive(arrived_ptr + 1)

    y = _product(down_ptr, n, n < o_end, gated_ptr, token, there, norm_ptr, arrived_ptr + 1,
                 F, False, BLOCK_O, BLOCK_T, SPAN_F, WARPS, False, PROGRAMS, EMULATED)  # fmt: skip
    if program == 0:
        tl.store(arrived_ptr, 0)
    tl.store(out_ptr + at, (y + middle.to(tl.float32)).to(dtype), mask=own)
    arrive(last_ptr)

    for i in tl.static_range(0, QKV_ROWS, BLOCK_QKV):
        q = qkv_row + i + tl.arange(0, BLOCK_QKV)
        bias = tl.zeros([BLOCK_QKV], tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + q, mask=q < qkv_end, other=0.0).to(tl.float32)
        y = _product(qkv_ptr, q, q < qkv_end, out_ptr, token, there, next_norm_ptr, last_ptr,
                     D, True, BLOCK_QKV, BLOCK_T, SPAN_D, WARPS, False, PROGRAMS if i == 0 else 0,
                     EMULATED)  # fmt: skip
        if i == 0:
            scale = _scale(out_ptr, token, there, D, BLOCK_D, NEXT_EPS)
        inside = (q < qkv_end)[:, None] & there[None, :]
        tl.store(projected_ptr + token[None, :] * Q + q[:, None], (y * scale + bias[:, None]).to(dtype), mask=inside)
    if program == 0:
        tl.store(arrived_ptr + 1, 0)


def _few_rows(site: CallSite) -> bool:
    x, o, down = (site.args[name] for name in ("x_TA", "o_DA", "down_DF"))
    inner = (*o.shape, down.shape[1])
    half = x.dtype in (torch.bfloat16, torch.float16)
    spans = all(n % _SPANS[-1] == 0 for n in inner)
    narrow = -(-o.shape[0] // site.target.multiprocessors) <= _MOST_O_ROWS
    return fits(site) and 1 < site.rows("x_TA") <= _MOST_ROWS and half and spans and narrow


def _configs(site: CallSite) -> list[Config]:
    block_t = 8 if site.rows("x_TA") <= 8 else 16
    return [{**config, "programs": site.target.multiprocessors, "block_t": block_t} for config in _CONFIGS]


@linear_chain.impl("triton_few_rows", device="cuda", supports=_few_rows, configs=_configs)
def triton_few_rows(
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
    warps: int,
    ahead: int,
    programs: int,
    block_t: int,
) -> tuple[Tensor, Tensor]:
    """2 to 16 rows of x, by one kernel."""
    emulated = triton.knobs.runtime.interpret
    T, (D, A), F, Q = x_TA.shape[0], o_DA.shape, down_DF.shape[1], qkv_QD.shape[0]
    programs = 1 if emulated else programs  # which run one after another there, and could not wait for each other
    o_rows, pairs, qkv_rows = (-(-n // programs) for n in (D, F, Q))

    def span(inner: int) -> int:
        """The longest that divides it and leaves something to every warp, or the shortest."""
        return next((s for s in _SPANS if inner % s == 0 and inner // s >= warps), _SPANS[-1])

    def rows(count: int, most: int) -> int:
        """Of a tile: as tensor cores take them."""
        return min(most, max(16, triton.next_power_of_2(count)))

    def lines(count: int, inner: int) -> int:
        return lines_of(count, inner, x_TA.element_size()) if ahead and not emulated else 0

    out_TD, projected_TQ = x_TA.new_empty((T, D)), x_TA.new_empty((T, Q))
    launch_triton(
        few_rows_kernel, (programs,),
        x_TA, residual_TD, o_DA, norm_D, gate_up_2FD, down_DF, next_norm_D, qkv_QD, x_TA if bias_Q is None else bias_Q,
        x_TA.new_empty((T, D)), x_TA.new_empty((T, F)), out_TD, projected_TQ, zeroed(x_TA, 2),
        x_TA.new_empty(1, dtype=torch.int32), T,
        A=A, D=D, F=F, Q=Q, EPS=eps, NEXT_EPS=next_eps, BIAS=bias_Q is not None, PROGRAMS=programs, O_ROWS=o_rows,
        PAIRS=pairs, QKV_ROWS=qkv_rows, BLOCK_T=block_t, BLOCK_O=max(16, triton.next_power_of_2(o_rows)),
        BLOCK_GATE=rows(2 * pairs, tile), BLOCK_QKV=rows(qkv_rows, tile), BLOCK_D=triton.next_power_of_2(D),
        SPAN_A=span(A), SPAN_D=span(D), SPAN_F=span(F), HALF_LINES=lines(pairs, D),
        DOWN_LINES=lines(o_rows, F), QKV_LINES=lines(qkv_rows, D), WARPS=warps, EMULATED=emulated, num_warps=warps,
    )  # fmt: skip
    return out_TD, projected_TQ
