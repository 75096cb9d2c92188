"""One Triton kernel for the linear layers from one attention to the next, for one row of x.

Of a small model each of these layers is read in 1 to 3 us, about as long as one kernel takes to see what the one before
it wrote. Here as many programs as there are multiprocessors compute the four layers in turn. Each has its rows of every
weight: it asks for all of them to be brought to the L2 cache while attention still runs, and loads the first tile of
the next layer into registers before it waits for that layer's input.

There is no barrier. What a layer makes goes to memory that is empty, which is zeros, and whoever reads a row reads it
until no number is missing; a zero among the results is written as -0. A number is emptied by the program that wrote it
when it has all of the row after the next: whoever wrote a part of that has read the whole of the one before.

Programs that wait for each other must all be running. There is one for each multiprocessor at most, and a kernel that
starts early finds room once all programs of the one before it have begun, so none is kept out by a later one.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, zeroed
from graphllm.ops.linear_chain.op import linear_chain

Config = Mapping[str, int]
_LINE = 128  # bytes of a line of the L2 cache
_MOST_BYTES = 1 << 26  # of the weights: larger ones take so long to be read that waiting for each other is little
_CONFIGS = [  # tile: numbers of a tile of weights; ahead: whether weights are fetched to L2 before the kernel waits
    {"tile": 1 << 15, "warps": 8, "ahead": 1},
    {"tile": 1 << 15, "warps": 8, "ahead": 0},
    {"tile": 1 << 14, "warps": 8, "ahead": 1},
    {"tile": 1 << 14, "warps": 8, "ahead": 0},
    {"tile": 1 << 15, "warps": 16, "ahead": 1},
    {"tile": 1 << 15, "warps": 16, "ahead": 0},
]


@triton.jit
def _give(row_ptr, at, numbers, inside, dtype: tl.constexpr):
    """Write numbers of a row for those who wait for them."""
    WORD: tl.constexpr = row_ptr.dtype.element_ty
    words = numbers.to(dtype).to(WORD, bitcast=True)
    tl.store(row_ptr + at, tl.where(words == 0, -(1 << (WORD.primitive_bitwidth - 1)), words).to(WORD), mask=inside)


@triton.jit
def _take(row_ptr, dtype: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A row of K numbers, as soon as all are there; zeros behind them."""
    k = tl.arange(0, BLOCK_K)
    words = tl.load(row_ptr + k, mask=k < K, other=0, volatile=True)
    while tl.sum(((words == 0) & (k < K)).to(tl.int32), axis=0) > 0:
        words = tl.load(row_ptr + k, mask=k < K, other=0, volatile=True)
    return words.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _empty(row_ptr, row, end, ROWS: tl.constexpr):
    """Make the numbers of a program's rows zeros. ROWS: a power of two that holds them."""
    n = row + tl.arange(0, ROWS)
    tl.store(row_ptr + n, tl.zeros([ROWS], row_ptr.dtype.element_ty), mask=n < end)


@triton.jit
def fetch_rows(weight_ptr, first, end, K: tl.constexpr, LINES: tl.constexpr):
    """Ask for the rows first to end of the weights, at most LINES lines of the cache, to be brought to L2."""
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    if first < end:
        last = (end - first) * K - 1
        line = weight_ptr + first.to(tl.int64) * K + tl.minimum(tl.arange(0, LINES) * LINE, last)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _weights(weight_ptr, row, end, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of weights: whole rows from a row on, zeros from ``end`` on."""
    n = row + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < end)[:, None] & (k < K)[None, :]
    return tl.load(weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)


@triton.jit
def _row(x_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    k = tl.arange(0, BLOCK_K)
    return tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _normed(x, norm, K: tl.constexpr, EPS: tl.constexpr):
    """x times the norm's weights, and the factor that its products are still to be multiplied by."""
    return x * norm, tl.rsqrt(tl.sum(x * x, axis=0) / K + EPS)


@triton.jit
def _products(weight, x):
    return tl.sum(weight.to(tl.float32) * x[None, :], axis=1)


@triton.jit
def chain_kernel(
    x_ptr,
    residual_ptr,
    o_ptr,
    norm_ptr,
    gate_up_ptr,
    down_ptr,
    next_norm_ptr,
    qkv_ptr,
    bias_ptr,
    out_ptr,
    projected_ptr,
    zeros_ptr,  # int32, zero before and after: room for the residual stream behind attention [D], gated products [F]
    last_ptr,  # int32: room for the residual stream behind the layer [D]
    A: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    Q: tl.constexpr,
    EPS: tl.constexpr,
    NEXT_EPS: tl.constexpr,
    BIAS: tl.constexpr,
    O_ROWS: tl.constexpr,  # rows of the weights that a program has: of o and down, of each half of gate_up, of qkv
    PAIRS: tl.constexpr,
    QKV_ROWS: tl.constexpr,
    ROWS: tl.constexpr,  # O_ROWS and PAIRS, up to powers of two
    PAIRS_ROOM: tl.constexpr,
    BLOCK_O: tl.constexpr,  # of these, in a tile
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DOWN: tl.constexpr,
    BLOCK_QKV: tl.constexpr,
    BLOCK_A: tl.constexpr,  # entries of a row, up to a power of two
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
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
    up_ptr = gate_up_ptr + F * D
    weight = _weights(o_ptr, o_row, o_end, A, BLOCK_O, BLOCK_A)
    if HALF_LINES:
        fetch_rows(gate_up_ptr, pair, pair_end, D, HALF_LINES)
        fetch_rows(up_ptr, pair, pair_end, D, HALF_LINES)
        fetch_rows(down_ptr, o_row, o_end, F, DOWN_LINES)
        fetch_rows(qkv_ptr, qkv_row, qkv_end, D, QKV_LINES)
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    WORD: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    middle_ptr = zeros_ptr.to(tl.pointer_type(WORD), bitcast=True)
    gated_ptr = middle_ptr + D
    last_ptr = last_ptr.to(tl.pointer_type(WORD), bitcast=True)
    x = _row(x_ptr, A, BLOCK_A)
    _empty(last_ptr, o_row, o_end, ROWS)
    if not EMULATED:  # before anybody sees a number of this program
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r,r", [tl.zeros([1], tl.int32)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
        tl.debug_barrier()

    for i in tl.static_range(0, O_ROWS, BLOCK_O):
        n = o_row + i + tl.arange(0, BLOCK_O)
        before = tl.load(residual_ptr + n, mask=n < o_end, other=0.0).to(tl.float32)
        y = _products(weight, x) + before
        if i + BLOCK_O < O_ROWS:
            weight = _weights(o_ptr, o_row + i + BLOCK_O, o_end, A, BLOCK_O, BLOCK_A)
        _give(middle_ptr, n, y, n < o_end, dtype)

    gate = _weights(gate_up_ptr, pair, pair_end, D, BLOCK_PAIRS, BLOCK_D)
    up = _weights(up_ptr, pair, pair_end, D, BLOCK_PAIRS, BLOCK_D)
    norm = _row(norm_ptr, D, BLOCK_D)
    x, scale = _normed(_take(middle_ptr, dtype, D, BLOCK_D), norm, D, EPS)
    for i in tl.static_range(0, PAIRS, BLOCK_PAIRS):
        n = pair + i + tl.arange(0, BLOCK_PAIRS)
        g = _products(gate, x) * scale
        u = _products(up, x) * scale
        if i + BLOCK_PAIRS < PAIRS:
            gate = _weights(gate_up_ptr, pair + i + BLOCK_PAIRS, pair_end, D, BLOCK_PAIRS, BLOCK_D)
            up = _weights(up_ptr, pair + i + BLOCK_PAIRS, pair_end, D, BLOCK_PAIRS, BLOCK_D)
        _give(gated_ptr, n, g / (1.0 + tl.exp(-g)) * u, n < pair_end, dtype)

    weight = _weights(down_ptr, o_row, o_end, F, BLOCK_DOWN, BLOCK_F)
    x = _take(gated_ptr, dtype, F, BLOCK_F)
    for i in tl.static_range(0, O_ROWS, BLOCK_DOWN):
        n = o_row + i + tl.arange(0, BLOCK_DOWN)
        before = tl.load(middle_ptr + n, mask=n < o_end, other=0, volatile=True)
        y = _products(weight, x) + before.to(dtype, bitcast=True).to(tl.float32)
        if i + BLOCK_DOWN < O_ROWS:
            weight = _weights(down_ptr, o_row + i + BLOCK_DOWN, o_end, F, BLOCK_DOWN, BLOCK_F)
        _give(last_ptr, n, y, n < o_end, dtype)
        tl.store(out_ptr + n, y.to(dtype), mask=n < o_end)
    tl.debug_barrier()  # several threads may read what one empties
    _empty(middle_ptr, o_row, o_end, ROWS)

    weight = _weights(qkv_ptr, qkv_row, qkv_end, D, BLOCK_QKV, BLOCK_D)
    norm = _row(next_norm_ptr, D, BLOCK_D)
    x, scale = _normed(_take(last_ptr, dtype, D, BLOCK_D), norm, D, NEXT_EPS)
    for i in tl.static_range(0, QKV_ROWS, BLOCK_QKV):
        n = qkv_row + i + tl.arange(0, BLOCK_QKV)
        bias = 0.0
        if BIAS:
            bias = tl.load(bias_ptr + n, mask=n < qkv_end, other=0.0).to(tl.float32)
        y = _products(weight, x) * scale + bias
        if i + BLOCK_QKV < QKV_ROWS:
            weight = _weights(qkv_ptr, qkv_row + i + BLOCK_QKV, qkv_end, D, BLOCK_QKV, BLOCK_D)
        tl.store(projected_ptr + n, y.to(dtype), mask=n < qkv_end)
    _empty(gated_ptr, pair, pair_end, PAIRS_ROOM)


def fits(site: CallSite) -> bool:
    """Whether weights are few enough, of one dtype and contiguous, and rows may depend on how many they are."""
    a = site.args
    weights = [a[name] for name in ("o_DA", "gate_up_2FD", "down_DF", "qkv_QD")]
    tensors = (*weights, a["x_TA"], a["residual_TD"], a["norm_D"], a["next_norm_D"])
    same = all(t.dtype == a["x_TA"].dtype and t.is_contiguous() for t in tensors)
    few = sum(w.numel() * w.element_size() for w in weights) <= _MOST_BYTES
    return same and few and not site.deterministic


def lines_of(rows: int, inner: int, itemsize: int) -> int:
    """Lines of the cache that rows of weights fill, up to a power of two."""
    return triton.next_power_of_2(-(-rows * inner * itemsize // _LINE))


def _one_row(site: CallSite) -> bool:
    rows = site.args["x_TA"].shape[0]
    return isinstance(rows, int) and rows == 1 and fits(site)


def _chain_configs(site: CallSite) -> list[Config]:
    return [{**config, "programs": site.target.multiprocessors} for config in _CONFIGS]


@linear_chain.impl("triton_chain", device="cuda", supports=_one_row, configs=_chain_configs)
def triton_chain(
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
) -> tuple[Tensor, Tensor]:
    """One row of x, by one kernel."""
    emulated = triton.knobs.runtime.interpret
    (D, A), F, Q = o_DA.shape, down_DF.shape[1], qkv_QD.shape[0]
    programs = 1 if emulated else programs  # which run one after another there, and could not wait for each other
    o_rows, pairs, qkv_rows = (-(-n // programs) for n in (D, F, Q))

    def rows(count: int, inner: int, matrices: int = 1) -> int:
        """Of a tile: a power of two."""
        return max(1, min(triton.next_power_of_2(count), tile // (matrices * triton.next_power_of_2(inner))))

    def lines(count: int, inner: int) -> int:
        return lines_of(count, inner, x_TA.element_size()) if ahead and not emulated else 0

    out_TD, projected_TQ = x_TA.new_empty((1, D)), x_TA.new_empty((1, Q))
    launch_triton(
        chain_kernel, (programs,),
        x_TA, residual_TD, o_DA, norm_D, gate_up_2FD, down_DF, next_norm_D, qkv_QD, x_TA if bias_Q is None else bias_Q,
        out_TD, projected_TQ, zeroed(x_TA, D + F), x_TA.new_empty(D, dtype=torch.int32),
        A=A, D=D, F=F, Q=Q, EPS=eps, NEXT_EPS=next_eps, BIAS=bias_Q is not None, O_ROWS=o_rows,
        PAIRS=pairs, QKV_ROWS=qkv_rows, ROWS=triton.next_power_of_2(o_rows), PAIRS_ROOM=triton.next_power_of_2(pairs),
        BLOCK_O=rows(o_rows, A), BLOCK_PAIRS=rows(pairs, D, 2), BLOCK_DOWN=rows(o_rows, F),
        BLOCK_QKV=rows(qkv_rows, D), BLOCK_A=triton.next_power_of_2(A), BLOCK_D=triton.next_power_of_2(D),
        BLOCK_F=triton.next_power_of_2(F),
        HALF_LINES=lines(pairs, D), DOWN_LINES=lines(o_rows, F), QKV_LINES=lines(qkv_rows, D),
        EMULATED=emulated, num_warps=warps,
    )  # fmt: skip
    return out_TD, projected_TQ
