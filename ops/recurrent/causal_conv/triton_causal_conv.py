"""causal_conv on a GPU: a program has a block of tokens and channels. Where a window begins before the step, it reads
the state."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.recurrent.causal_conv.op import causal_conv
from graphllm.ops.recurrent.slots import Slots

_TOKENS, _CHANNELS = 16, 128


@triton.jit
def _step_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr,
    X_ROW: tl.constexpr, WEIGHT_ROW: tl.constexpr, SLOT: tl.constexpr, VERSION: tl.constexpr, VERSIONS: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, MOST: tl.constexpr,
    BLOCK_D: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Few tokens of a sequence: a program has a block of channels, and their last inputs in registers. MOST: tokens
    that a sequence has at most; where it is 1, nothing loops."""
    gdc_wait_early(EMULATED)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.program_id(1)
    first = tl.load(start_ptr + s)
    count = tl.load(start_ptr + 1 + s) - first
    channel = d < D
    if count > 0:
        entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT + d
        before = entry + tl.load(version_ptr + s) * VERSION
        rows = ()
        taps = ()
        for j in tl.static_range(W - 1):
            rows += (tl.load(before + j * D, mask=channel, other=0),)  # type: ignore[assignment]
        for j in tl.static_range(W):
            tap = tl.load(weight_ptr + d * WEIGHT_ROW + j, mask=channel, other=0).to(tl.float32)
            taps += (tap,)  # type: ignore[assignment]
        bias = tl.zeros([BLOCK_D], tl.float32)
        if BIAS:
            bias += tl.load(bias_ptr + d, mask=channel, other=0).to(tl.float32)
        for i in range(1 if MOST == 1 else count):
            t = (first + i).to(tl.int64)
            x = tl.load(x_ptr + t * X_ROW + d, mask=channel, other=0)
            total = bias
            for j in tl.static_range(W - 1):
                total += rows[j].to(tl.float32) * taps[j]
            total += x.to(tl.float32) * taps[W - 1]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=channel)
            rows = rows[1:]
            rows += (x,)  # type: ignore[assignment]
            if (count <= VERSIONS) | (i == count - 1):
                kept = entry + tl.minimum(i, VERSIONS - 1) * VERSION
                for j in tl.static_range(W - 1):
                    tl.store(kept + j * D, rows[j], mask=channel)


@triton.jit(do_not_specialize_on_alignment=["S"])
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr, S,
    X_ROW: tl.constexpr, WEIGHT_ROW: tl.constexpr, SLOT: tl.constexpr, VERSION: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.zeros([BLOCK_T], tl.int32)
    for base in range(0, S, BLOCK_S):
        k = base + tl.arange(0, BLOCK_S)
        ends = tl.load(start_ptr + 1 + k, mask=k < S, other=2147483647)
        s += tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
    owned = s < S  # rows beyond the last sequence are padding
    first = tl.load(start_ptr + s, mask=owned, other=0)
    entry = state_ptr + tl.load(slot_ptr + s, mask=owned, other=0).to(tl.int64) * SLOT
    before = entry + tl.load(version_ptr + s, mask=owned, other=0) * VERSION
    i = t - first
    channel = (d < D)[None, :] & owned[:, None]
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + d, mask=d < D, other=0).to(tl.float32)[None, :]
    for j in tl.static_range(W):
        place = i - (W - 1) + j
        row = (t - (W - 1) + j).to(tl.int64)
        new = tl.load(x_ptr + row[:, None] * X_ROW + d[None, :], mask=channel & (place >= 0)[:, None], other=0)
        old = tl.load(
            before[:, None] + ((W - 1 + place) * D)[:, None] + d[None, :], mask=channel & (place < 0)[:, None], other=0
        )
        tap = tl.load(weight_ptr + d * WEIGHT_ROW + j, mask=d < D, other=0).to(tl.float32)
        total += tl.where((place >= 0)[:, None], new, old).to(tl.float32) * tap[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + t.to(tl.int64)[:, None] * D + d[None, :], total.to(out_ptr.dtype.element_ty), mask=channel)


@triton.jit
def _keep_kernel(
    x_ptr, state_ptr, start_ptr, slot_ptr, version_ptr,
    X_ROW: tl.constexpr, SLOT: tl.constexpr, VERSION: tl.constexpr, VERSIONS: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The states of a sequence after the step, for a block of channels. All is read before anything is written."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.program_id(1)
    first = tl.load(start_ptr + s)
    count = tl.load(start_ptr + 1 + s) - first
    entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT
    before = entry + tl.load(version_ptr + s) * VERSION
    j = tl.arange(0, W_PAD)
    inside = (j < W - 1)[:, None] & (d < D)[None, :]
    old = tl.load(before + j[:, None] * D + d[None, :], mask=inside, other=0)
    several = count <= VERSIONS
    for version in tl.static_range(VERSIONS):
        i = tl.where(several, version, count - 1)  # the token after which this version is kept
        place = i - (W - 2) + j  # of each row, among the step's tokens
        new = tl.load(
            x_ptr + (first + place).to(tl.int64)[:, None] * X_ROW + d[None, :], mask=inside & (place >= 0)[:, None],
            other=0,
        )  # fmt: skip
        # Row j of what is kept is row j + i + 1 of what was there before.
        moved = tl.sum(
            tl.where((tl.arange(0, W_PAD)[None, :] == (j + i + 1)[:, None])[:, :, None], old[None, :, :], 0.0), axis=1
        )
        kept = tl.where((place >= 0)[:, None], new, moved.to(new.dtype))
        written = tl.where(several, version < count, version == VERSIONS - 1)
        tl.store(entry + version * VERSION + j[:, None] * D + d[None, :], kept, mask=inside & written)


def _supports(site: CallSite) -> bool:
    x_TD, weight_DW, state, bias_D = (site.args[name] for name in ("x_TD", "weight_DW", "state", "bias_D"))
    return (
        x_TD.dtype == state.dtype
        and x_TD.dtype.itemsize <= 4
        and x_TD.stride(1) == weight_DW.stride(1) == state.stride(3) == 1
        and state.stride(2) == state.shape[3]
        and (bias_D is None or bias_D.stride(0) == 1)
    )


def _decodes(site: CallSite) -> bool:
    return site.bucket.kind == "decode" and _supports(site)


def _configs(site: CallSite) -> list[dict[str, int]]:
    return [
        {"most": site.bucket.query_len, "block": block, "num_warps": warps}
        for block, warps in ((128, 4), (256, 4), (512, 8))
    ]


@causal_conv.impl("triton_step", device="cuda", supports=_decodes, configs=_configs, row_order=each_alone)
def triton_step(
    x_TD: Tensor,
    weight_DW: Tensor,
    state: Tensor,
    at: Slots,
    bias_D: Tensor | None,
    activation: str,
    *,
    most: int,
    block: int,
    num_warps: int,
) -> Tensor:
    """One kernel for sequences of few tokens."""
    out_TD = x_TD.new_empty(x_TD.shape)
    D, W = weight_DW.shape
    launch_triton(
        _step_kernel, (-(-D // block), at.slots.shape[0]),
        *(x_TD, weight_DW, x_TD if bias_D is None else bias_D, state, out_TD, *at), X_ROW=x_TD.stride(0),
        WEIGHT_ROW=weight_DW.stride(0), SLOT=state.stride(0), VERSION=state.stride(1), VERSIONS=state.shape[1], D=D,
        W=W, BIAS=bias_D is not None, SILU=activation == "silu", MOST=most, BLOCK_D=block,
        EMULATED=triton.knobs.runtime.interpret, num_warps=num_warps,
    )  # fmt: skip
    return out_TD


@causal_conv.impl("triton", device="cuda", supports=_supports, row_order=each_alone)
def triton_causal_conv(
    x_TD: Tensor, weight_DW: Tensor, state: Tensor, at: Slots, bias_D: Tensor | None, activation: str
) -> Tensor:
    """Two kernels: the sums, then the states."""
    (T, D), W, S = x_TD.shape, weight_DW.shape[1], at.slots.shape[0]
    out_TD = x_TD.new_empty(x_TD.shape)
    shared = {
        "X_ROW": x_TD.stride(0), "SLOT": state.stride(0), "VERSION": state.stride(1), "D": D, "W": W,
        "BLOCK_D": _CHANNELS,
    }  # fmt: skip
    blocks = -(-D // _CHANNELS)
    launch_triton(
        _conv_kernel, (blocks, (T + _TOKENS - 1) // _TOKENS),
        *(x_TD, weight_DW, x_TD if bias_D is None else bias_D, state, out_TD, *at, S), WEIGHT_ROW=weight_DW.stride(0),
        BIAS=bias_D is not None, SILU=activation == "silu", BLOCK_T=_TOKENS, BLOCK_S=128, **shared,
    )  # fmt: skip
    padded = max(2, triton.next_power_of_2(W - 1))
    launch_triton(_keep_kernel, (blocks, S), x_TD, state, *at, VERSIONS=state.shape[1], W_PAD=padded, **shared)
    return out_TD
