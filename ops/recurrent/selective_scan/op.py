"""selective_scan: the recurrence of Mamba, whose step size, input and output depend on the token."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.recurrent.slots import Slots, border_of, sequences, version_after


def _cost(x_TD: Tensor, dt_TD: Tensor, A_DN: Tensor, B_TN: Tensor, C_TN: Tensor, state: Tensor, at: Slots) -> Cost:
    T, (D, N) = x_TD.shape[0], A_DN.shape
    states = 2 * at.slots.shape[0] * D * N * state.element_size() if T else 0
    return Cost(nbytes(x_TD, dt_TD, B_TN, C_TN, A_DN) + nbytes(x_TD) + states, 7 * T * D * N)


@op(boundary=True, mutates=("state",), cost=_cost)
def selective_scan(
    x_TD: Tensor,
    dt_TD: Tensor,
    A_DN: Tensor,
    B_TN: Tensor,
    C_TN: Tensor,
    state: Tensor,
    at: Slots,
    D_D: Tensor | None = None,
    dt_bias_D: Tensor | None = None,
    exports: Tensor | None = None,
) -> Tensor:
    """y [T, D] in x's dtype: of each channel d and token, with dt = softplus(dt + dt_bias),
    s[n] = exp(dt A[d, n]) s[n] + dt x[d] B[n], then y[d] = sum over n of s[n] C[n], plus D[d] x[d].

    x_TD, dt_TD [T, D] and B_TN, C_TN [T, N]: of one dtype; rows may be strided. A_DN [D, N]: negative. D_D, dt_bias_D
    [D] (None: 0). These three are float32. state [slots, versions, D, N], N contiguous: s, which is read and written as
    `Slots` says; float32, or rounded to 16 bits where it is written.
    exports: as `gated_delta` has them.
    Computes in float32, or in float64 for such x; the result is rounded once. Rows at or after query_start_loc[S] are
    padding and come back unspecified.
    Source: Gu and Dao 2023, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, algorithm 2.
    """
    compute = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    out_TD = torch.zeros_like(x_TD, memory_format=torch.contiguous_format)
    A_DN, versions = A_DN.to(compute), state.shape[1]
    step_TD = dt_TD.to(compute)
    if dt_bias_D is not None:
        step_TD = step_TD + dt_bias_D.to(compute)
    # softplus; torch's own is the identity above 20, which float64 tells from it.
    step_TD = step_TD.clamp(min=0) + torch.log1p(torch.exp(-step_TD.abs()))
    for rows, entry, version, export in sequences(at, exports):
        s_DN = state[entry, version].to(compute)
        x, B, C = (t[rows].to(compute) for t in (x_TD, B_TN, C_TN))
        outs = []
        for i, step_D in enumerate(step_TD[rows]):
            s_DN = s_DN * torch.exp(step_D[:, None] * A_DN) + (step_D * x[i])[:, None] * B[i]
            outs.append(s_DN @ C[i])
            if (kept := version_after(i, len(x), versions)) is not None:
                state[entry, kept] = s_DN.to(state.dtype)
            if export >= 0 and i + 1 == border_of(len(x)):
                state[export, 0] = s_DN.to(state.dtype)
        y = torch.stack(outs)
        if D_D is not None:
            y = y + D_D.to(compute) * x
        out_TD[rows] = y.to(x_TD.dtype)
    return out_TD


@selective_scan.fake
def _(x_TD: Tensor) -> Tensor:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
