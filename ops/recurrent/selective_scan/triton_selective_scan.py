"""selective_scan in Triton: one program for each sequence and block of channels, which reads and writes states once and
goes through the tokens."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ops.recurrent.selective_scan.cpu import plain
from graphllm.ops.recurrent.selective_scan.op import selective_scan
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.triton_softplus import softplus

_ANY = 1 << 30  # tokens of a sequence
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize_on_alignment=["x_row", "dt_row", "A_row", "B_row", "C_row"])
def _scan_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, state_ptr, query_start_ptr, slots_ptr, versions_ptr, D_ptr, dt_bias_ptr,
    out_ptr, x_row, dt_row, A_row, B_row, C_row,
    D: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, SLOT: tl.constexpr, VERSION: tl.constexpr,
    VERSIONS: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, BLOCK_D: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """MOST: tokens that a sequence has at most; where it is 1, nothing loops: rows are read while the state is."""
    s = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, N_PAD)
    is_d, is_n = d < D, n < N
    inside = is_d[:, None] & is_n[None, :]
    first, end = tl.load(query_start_ptr + s), tl.load(query_start_ptr + s + 1)
    if first < end:
        places = d[:, None] * N + n[None, :]
        entry = state_ptr + tl.load(slots_ptr + s).to(tl.int64) * SLOT
        state = tl.load(entry + tl.load(versions_ptr + s) * VERSION + places, mask=inside, other=0.0).to(tl.float32)
        decay = tl.load(A_ptr + d[:, None] * A_row + n[None, :], mask=inside, other=0.0) * _LOG2E
        skip = tl.load(D_ptr + d, mask=is_d, other=0.0) if SKIP else tl.zeros([BLOCK_D], tl.float32)
        bias = tl.load(dt_bias_ptr + d, mask=is_d, other=0.0) if BIAS else tl.zeros([BLOCK_D], tl.float32)
        for i in range(1 if MOST == 1 else end - first):
            t = first + i
            row = t.to(tl.int64)
            x = tl.load(x_ptr + row * x_row + d, mask=is_d, other=0.0).to(tl.float32)
            step = softplus(tl.load(dt_ptr + row * dt_row + d, mask=is_d, other=0.0).to(tl.float32) + bias)
            given = tl.load(B_ptr + row * B_row + n, mask=is_n, other=0.0).to(tl.float32)
            taken = tl.load(C_ptr + row * C_row + n, mask=is_n, other=0.0).to(tl.float32)
            state = state * tl.exp2(step[:, None] * decay) + (step * x)[:, None] * given[None, :]
            y = tl.sum(state * taken[None, :], axis=1) + skip * x
            tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=is_d)
            if (t == end - 1) | (end - first <= VERSIONS):
                kept = entry + tl.minimum(t - first, VERSIONS - 1) * VERSION + places
                tl.store(kept, state.to(state_ptr.dtype.element_ty), mask=inside)


def _supports(site: CallSite) -> bool:
    return site.args["state"].dtype.itemsize <= 4 and plain(site)


def _configs(site: CallSite) -> list[dict[str, int]]:
    """Deterministic steps of all kinds have the same instructions."""
    single = site.bucket.kind == "decode" and site.bucket.query_len == 1 and not site.deterministic
    return [
        {"block": block, "num_warps": warps, "most": 1 if single else _ANY}
        for block, warps in ((32, 1), (16, 1), (64, 2), (64, 4), (128, 4))
    ]


@selective_scan.impl("triton_scan", device="cuda", supports=_supports, configs=_configs, row_order=each_alone)
def triton_scan(
    x_TD: Tensor,
    dt_TD: Tensor,
    A_DN: Tensor,
    B_TN: Tensor,
    C_TN: Tensor,
    state: Tensor,
    at: Slots,
    D_D: Tensor | None = None,
    dt_bias_D: Tensor | None = None,
    *,
    block: int = 32,
    num_warps: int = 1,
    most: int = _ANY,
) -> Tensor:
    """Made for decode, which memory bounds. Of a prompt the tokens are taken one after the other."""
    out_TD = x_TD.new_empty(x_TD.shape)
    D, N = A_DN.shape
    launch_triton(
        _scan_kernel, ((D + block - 1) // block, at.slots.shape[0]),
        x_TD, dt_TD, A_DN, B_TN, C_TN, state, *at, A_DN if D_D is None else D_D,
        A_DN if dt_bias_D is None else dt_bias_D, out_TD,
        *(t.stride(0) for t in (x_TD, dt_TD, A_DN, B_TN, C_TN)),
        D=D, N=N, N_PAD=max(2, triton.next_power_of_2(N)), SLOT=state.stride(0), VERSION=state.stride(1),
        VERSIONS=state.shape[1], SKIP=D_D is not None, BIAS=dt_bias_D is not None, BLOCK_D=block, MOST=most,
        num_warps=num_warps,
    )  # fmt: skip
    return out_TD
