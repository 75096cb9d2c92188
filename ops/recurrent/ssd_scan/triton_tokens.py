"""ssd_scan token by token: a program has a sequence's head and a block of its rows, whose state it reads and writes
once."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.triton_softplus import softplus


@triton.jit
def _one_token(
    state, t, A, bias, skip, x_ptr, dt_ptr, b_ptr, c_ptr, out_ptr, n, p,
    X_ROW: tl.constexpr, DT_ROW: tl.constexpr, B_ROW: tl.constexpr, C_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
):  # fmt: skip
    """The state after token t, whose result is stored. Pointers are a head's, and its group's."""
    t = t.to(tl.int64)
    dt = tl.maximum(softplus(tl.load(dt_ptr + t * DT_ROW).to(tl.float32) + bias), DT_MIN)
    if DT_MAX > 0:
        dt = tl.minimum(dt, DT_MAX)
    x = tl.load(x_ptr + t * X_ROW + p, mask=p < P, other=0).to(tl.float32)
    B = tl.load(b_ptr + t * B_ROW + n, mask=n < N, other=0).to(tl.float32)
    C = tl.load(c_ptr + t * C_ROW + n, mask=n < N, other=0).to(tl.float32)
    state = state * tl.exp(dt * A) + (dt * x)[:, None] * B[None, :]
    y = tl.sum(state * C[None, :], axis=1) + skip * x
    tl.store(out_ptr + t * OUT_ROW + p, y.to(out_ptr.dtype.element_ty), mask=p < P)
    return state


@triton.jit
def token_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, bias_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr,
    X_ROW: tl.constexpr, DT_ROW: tl.constexpr, B_ROW: tl.constexpr, C_ROW: tl.constexpr, SLOT: tl.constexpr,
    VERSION: tl.constexpr, VERSIONS: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, SKIP: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr, N_PAD: tl.constexpr,
    BLOCK_P: tl.constexpr, MOST: tl.constexpr, SINGLE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """MOST: sequences of more tokens are left to another kernel. SINGLE: whether one token goes without a loop, so that
    its rows are read while the state is."""
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    h, s = tl.program_id(1), tl.program_id(2)
    first = tl.load(start_ptr + s)
    count = tl.load(start_ptr + 1 + s) - first
    own = (count > 0) & (count <= MOST)
    p, n = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, N_PAD)
    group = h // (H // G) * N
    entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT
    before = entry
    if VERSIONS > 1:
        if not EMULATED:
            tl.extra.cuda.gdc_wait()  # a kernel of the step makes the versions
        before += tl.load(version_ptr + s) * VERSION
    places = ((h * P + p) * N)[:, None] + n[None, :]
    inside = (p < tl.where(own, P, 0))[:, None] & (n < N)[None, :]
    state = tl.load(before + places, mask=inside, other=0)
    A = tl.load(a_ptr + h)
    bias = tl.load(bias_ptr + h) if BIAS else 0.0
    skip = tl.load(d_ptr + h) if SKIP else 0.0
    if VERSIONS == 1 and not EMULATED:
        tl.extra.cuda.gdc_wait()
    if own:
        if SINGLE and (MOST == 1 or count == 1):
            after = _one_token(
                state.to(tl.float32), first, A, bias, skip, x_ptr + h * P, dt_ptr + h, b_ptr + group, c_ptr + group,
                out_ptr + h * P, n, p, X_ROW, DT_ROW, B_ROW, C_ROW, H * P, P, N, DT_MIN, DT_MAX,
            )  # fmt: skip
            tl.store(entry + places, after.to(state_ptr.dtype.element_ty), mask=inside)
        else:
            running = state.to(tl.float32)
            for i in range(count):
                running = _one_token(
                    running, first + i, A, bias, skip, x_ptr + h * P, dt_ptr + h, b_ptr + group, c_ptr + group,
                    out_ptr + h * P, n, p, X_ROW, DT_ROW, B_ROW, C_ROW, H * P, P, N, DT_MIN, DT_MAX,
                )  # fmt: skip
                if (count <= VERSIONS) | (i == count - 1):
                    kept = entry + tl.minimum(i, VERSIONS - 1) * VERSION + places
                    tl.store(kept, running.to(state_ptr.dtype.element_ty), mask=inside)


def launch_tokens(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    state: Tensor,
    at: Slots,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    limits: tuple[float, float],
    out_THP: Tensor,
    *,
    most: int,
    block: int = 16,
    num_warps: int = 2,
    single: int = 1,
) -> None:
    """The kernel for sequences of at most `most` tokens. block: rows of a state that a program has. single: whether one
    token has instructions of its own, 0 or 1."""
    (_, H, P), (_, G, N) = x_THP.shape, B_TGN.shape
    launch_triton(
        token_kernel, (-(-P // block), H, at.slots.shape[0]),
        *(x_THP, dt_TH, A_H, B_TGN, C_TGN, A_H if D_H is None else D_H, A_H if dt_bias_H is None else dt_bias_H),
        *(state, out_THP, *at), X_ROW=x_THP.stride(0), DT_ROW=dt_TH.stride(0), B_ROW=B_TGN.stride(0),
        C_ROW=C_TGN.stride(0), SLOT=state.stride(0), VERSION=state.stride(1), VERSIONS=state.shape[1], H=H, P=P, G=G,
        N=N, BIAS=dt_bias_H is not None, SKIP=D_H is not None, DT_MIN=limits[0], DT_MAX=limits[1],
        N_PAD=triton.next_power_of_2(N), BLOCK_P=block, MOST=most, SINGLE=single,
        EMULATED=triton.knobs.runtime.interpret, num_warps=num_warps,
    )  # fmt: skip
