"""causal_conv on a GPU: a program has a block of channels and a tile of a sequence's tokens, whose last inputs stay in
registers."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ops.recurrent.causal_conv.op import causal_conv
from graphllm.ops.recurrent.slots import Slots, exporting
from graphllm.program.schema import BORDER

_CHANNELS = 256  # of a program
_ALL = 1 << 30  # tokens of a sequence
_AT_ONCE = tl.constexpr(8)  # tokens of a tile that are read before they are computed
_SEQUENCES = tl.constexpr(128)  # whose first rows are read together


@triton.jit
def _find_tile(start_ptr, tile, S, TILE: tl.constexpr):
    """The sequence that has a tile of TILE tokens, and the row where the tile begins, which may lie behind the
    sequence. Tiles of sequence s have numbers from query_start_loc[s] // TILE + s on."""
    before = tl.zeros([_SEQUENCES], tl.int32)
    for base in range(0, S, _SEQUENCES):
        k = base + tl.arange(0, _SEQUENCES)
        before += (tl.load(start_ptr + k, mask=k < S, other=2147483647) // TILE + k <= tile).to(tl.int32)
    s = tl.sum(before, axis=0) - 1
    first = tl.load(start_ptr + s)
    return s, first + (tile - first // TILE - s) * TILE


@triton.jit
def _taps(weight_ptr, d, D: tl.constexpr, WEIGHT_ROW: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr):
    """The W weights of each channel, read together."""
    j = tl.arange(0, W_PAD)
    inside = (d < D)[:, None] & (j < W)[None, :]
    weight = tl.load(weight_ptr + (d * WEIGHT_ROW)[:, None] + j[None, :], mask=inside, other=0).to(tl.float32)
    taps = ()
    for i in tl.static_range(W):
        taps += (tl.sum(tl.where((j == i)[None, :], weight, 0.0), 1),)  # type: ignore[assignment]
    return taps


@triton.jit
def _sum(rows, x, taps, bias, W: tl.constexpr, SILU: tl.constexpr):
    """What a token's inputs give: x, and rows of those before it."""
    total = bias
    for j in tl.static_range(W - 1):
        total += rows[j] * taps[j]
    total += x * taps[W - 1]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def _tokens(
    first, count, entry, rows, taps, bias, x_ptr, out_ptr, d, channel, X_ROW: tl.constexpr, VERSION: tl.constexpr,
    VERSIONS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """All tokens of a sequence, and its states after them. ONE: there is one token, and nothing loops."""
    for i in range(1 if ONE else count):
        t = (first + i).to(tl.int64)
        x = tl.load(x_ptr + t * X_ROW + d, mask=channel, other=0).to(tl.float32)
        total = _sum(rows, x, taps, bias, W, SILU)
        tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=channel)
        rows = rows[1:]
        rows += (x,)
        if (count <= VERSIONS) | (i == count - 1):
            kept = entry + tl.minimum(i, VERSIONS - 1) * VERSION
            for j in tl.static_range(W - 1):
                tl.store(kept + j * D, rows[j].to(kept.dtype.element_ty), mask=channel)


@triton.jit
def _tile(
    first, begin, end, entry, export, old, taps, bias, x_ptr, out_ptr, d, channel, X_ROW: tl.constexpr,
    VERSION: tl.constexpr, VERSIONS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    TILE: tl.constexpr, EXPORTS: tl.constexpr, BORDER: tl.constexpr, wanted,
):  # fmt: skip
    """Tokens of a sequence of at least W - 1. Who has the first ones reads the state, and writes it. Who has those
    after the border exports the inputs before it."""
    x_row = x_ptr + begin.to(tl.int64) * X_ROW + d
    out_row = out_ptr + begin.to(tl.int64) * D + d
    rows = ()
    for j in tl.static_range(1 - W, 0):
        new = tl.load(x_row + j * X_ROW, mask=d < tl.where(begin > first, D, 0), other=0).to(tl.float32)
        rows += (tl.where(begin > first, new, old[W - 1 + j]),)  # type: ignore[assignment]
    if begin == first:
        for j in tl.static_range(1 - W, 0):
            last = tl.load(x_ptr + (end + j).to(tl.int64) * X_ROW + d, mask=channel, other=0)
            tl.store(entry + (VERSIONS - 1) * VERSION + (W - 1 + j) * D, last, mask=channel)
    if EXPORTS:
        at_border = (begin > first) & (begin - first == (end - first - 1) // BORDER * BORDER)
        exported = d < tl.where(at_border, wanted, 0)
        for j in tl.static_range(W - 1):
            tl.store(export + j * D, rows[j].to(export.dtype.element_ty), mask=exported)
    count = tl.minimum(end - begin, TILE)
    for i in range(0, count, _AT_ONCE):
        xs = ()
        for k in tl.static_range(_AT_ONCE):
            inside = d < tl.where(i + k < count, D, 0)
            x = tl.load(x_row + (i + k) * X_ROW, mask=inside, other=0).to(tl.float32)
            xs += (x,)  # type: ignore[assignment]
        for k in tl.static_range(_AT_ONCE):
            total = _sum(rows, xs[k], taps, bias, W, SILU)
            inside = d < tl.where(i + k < count, D, 0)
            tl.store(out_row + (i + k) * D, total.to(out_ptr.dtype.element_ty), mask=inside)
            rows = rows[1:]
            rows += (xs[k],)  # type: ignore[assignment]


@triton.jit(do_not_specialize_on_alignment=["S"])
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr, export_ptr, S,
    X_ROW: tl.constexpr, WEIGHT_ROW: tl.constexpr, SLOT: tl.constexpr, VERSION: tl.constexpr, VERSIONS: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, FEW: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr, EXPORTS: tl.constexpr, BORDER: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """FEW: tokens of the longest sequence that goes token by token; other ones have tiles. TILE: 0 where there are no
    other ones."""
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    channel = d < D
    s = tl.program_id(1)
    if TILE > 0:
        s, begin = _find_tile(start_ptr, s, S, TILE)
    else:
        begin = tl.load(start_ptr + s)
    first, end = tl.load(start_ptr + s), tl.load(start_ptr + 1 + s)
    taps = _taps(weight_ptr, d, D, WEIGHT_ROW, W, W_PAD)
    bias = tl.zeros([BLOCK_D], tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + d, mask=channel, other=0).to(tl.float32)
    entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT + d
    before = entry
    if VERSIONS > 1:
        if not EMULATED:
            tl.extra.cuda.gdc_wait()  # a kernel of the step makes the versions
        before += tl.load(version_ptr + s) * VERSION
    rows = ()
    for j in tl.static_range(W - 1):
        old = tl.load(before + j * D, mask=d < tl.where((begin == first) & (begin < end), D, 0), other=0)
        rows += (old.to(tl.float32),)  # type: ignore[assignment]
    if VERSIONS == 1 and not EMULATED:
        tl.extra.cuda.gdc_wait()
    if begin < end:
        if TILE == 0 or end - first <= FEW:
            _tokens(
                first, end - first, entry, rows, taps, bias, x_ptr, out_ptr, d, channel, X_ROW, VERSION, VERSIONS, D, W,
                SILU, FEW == 1,
            )  # fmt: skip
        else:
            export = entry
            wanted = 0
            if EXPORTS:
                to = tl.load(export_ptr + s).to(tl.int64)
                wanted = tl.where(to >= 0, D, 0)
                export = state_ptr + tl.maximum(to, 0) * SLOT + d
            _tile(
                first, begin, end, entry, export, rows, taps, bias, x_ptr, out_ptr, d, channel, X_ROW, VERSION,
                VERSIONS, D, W, SILU, TILE, EXPORTS, BORDER, wanted,
            )  # fmt: skip


def _supports(site: CallSite) -> bool:
    x_TD, weight_DW, state, bias_D = (site.args[name] for name in ("x_TD", "weight_DW", "state", "bias_D"))
    return (
        x_TD.dtype == state.dtype
        and x_TD.dtype.itemsize <= 4
        and x_TD.stride(1) == weight_DW.stride(1) == state.stride(3) == 1
        and state.stride(2) == state.shape[3]
        and (bias_D is None or bias_D.stride(0) == 1)
    )


def _configs(site: CallSite) -> list[dict[str, int]]:
    """few: tokens of the longest sequence that goes token by token. tile: tokens of a program, of longer ones."""
    if site.bucket.kind == "decode":
        return [{"few": 1 if site.bucket.query_len == 1 else _ALL, "tile": 0}]
    return [{"few": max(site.args["weight_DW"].shape[1] - 1, site.args["state"].shape[1]), "tile": 32}]


@causal_conv.impl("triton", device="cuda", supports=_supports, configs=_configs, row_order=each_alone)
@exporting
def triton_causal_conv(
    x_TD: Tensor,
    weight_DW: Tensor,
    state: Tensor,
    at: Slots,
    bias_D: Tensor | None,
    activation: str,
    exports: Tensor | None,
    *,
    few: int,
    tile: int,
) -> Tensor:
    """One kernel. The program that reads a sequence's state writes it as well."""
    out_TD = x_TD.new_empty(x_TD.shape)
    (T, D), W, S = x_TD.shape, weight_DW.shape[1], at.slots.shape[0]
    places = (*at, at.slots if exports is None else exports)
    launch_triton(
        _conv_kernel, (-(-D // _CHANNELS), T // tile + S if tile else S),
        *(x_TD, weight_DW, x_TD if bias_D is None else bias_D, state, out_TD, *places, S), X_ROW=x_TD.stride(0),
        WEIGHT_ROW=weight_DW.stride(0), SLOT=state.stride(0), VERSION=state.stride(1), VERSIONS=state.shape[1], D=D,
        W=W, W_PAD=triton.next_power_of_2(W), BIAS=bias_D is not None, SILU=activation == "silu", FEW=few, TILE=tile,
        BLOCK_D=_CHANNELS, EXPORTS=exports is not None and tile > 0, BORDER=BORDER,
        EMULATED=triton.knobs.runtime.interpret, num_warps=2,
    )  # fmt: skip
    return out_TD
