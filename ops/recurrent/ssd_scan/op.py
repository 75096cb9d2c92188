"""ssd_scan: the recurrence of Mamba2 layers, one decay for each head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.recurrent.slots import Slots, border_of, sequences, version_after


def _cost(x_THP: Tensor, B_TGN: Tensor, state: Tensor, at: Slots) -> Cost:
    T, H, P = x_THP.shape
    N, S = B_TGN.shape[2], at.slots.shape[0]
    moved = 2 * min(S, T) * H * P * N * state.element_size()
    return Cost(2 * nbytes(x_THP) + 2 * nbytes(B_TGN) + moved, 5 * T * H * P * N)


@op(boundary=True, cost=_cost, mutates=("state",))
def ssd_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    state: Tensor,
    at: Slots,
    D_H: Tensor | None = None,
    dt_bias_H: Tensor | None = None,
    dt_min: float = 0.0,
    dt_max: float = 0.0,
    exports: Tensor | None = None,
) -> Tensor:
    """What each head reads from its state after each token: [T, H, P] in x's dtype, contiguous.

    For each token and head h, with group g = h // (H // G):
    dt = softplus(dt + dt_bias), between dt_min and dt_max;
    state = state * exp(dt * A) + dt * outer(x, B[g]);
    out = state @ C[g] + D * x.
    All is float32, but for the last rounding; float64 where x is.

    x_THP: [T, H, P], rows may be strided. Rows after the last sequence are padding, and what they give is unspecified.
    dt_TH: [T, H], rows may be strided.
    A_H: [H], negative. It and D_H and dt_bias_H are float32.
    B_TGN, C_TGN: [T, G, N], rows may be strided; H is a multiple of G.
    state: [slots, versions, H, P, N] float32, or rounded to 16 bits where it is written.
    D_H, dt_bias_H: [H].
    dt_min, dt_max: limits of dt; a dt_max of 0 is none.
    exports: [S] int32, the entry that has the state at `border_of` a sequence's tokens in its first version afterwards;
        negative for none. An implementation that is not `exporting` may leave it alone.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7.
    """
    exact = torch.promote_types(x_THP.dtype, torch.float32)
    H, G = x_THP.shape[1], B_TGN.shape[1]
    dt = dt_TH.to(exact) if dt_bias_H is None else dt_TH.to(exact) + dt_bias_H.to(exact)
    dt = softplus(dt).clamp(dt_min, dt_max or None)
    x, (B, C) = x_THP.to(exact), (t.to(exact).repeat_interleave(H // G, 1) for t in (B_TGN, C_TGN))
    y = torch.zeros(x_THP.shape, dtype=exact, device=x_THP.device)
    for rows, entry, version, export in sequences(at, exports):
        s_HPN, versions = state[entry, version].to(exact), state.shape[1]
        for i, t in enumerate(range(rows.start, rows.stop)):
            decay = torch.exp(dt[t] * A_H.to(exact))
            s_HPN = s_HPN * decay[:, None, None] + (dt[t, :, None] * x[t])[..., None] * B[t, :, None]
            y[t] = (s_HPN * C[t, :, None]).sum(-1)
            kept = version_after(i, rows.stop - rows.start, versions)
            if kept is not None:
                state[entry, kept] = s_HPN.to(state.dtype)
            if export >= 0 and i + 1 == border_of(rows.stop - rows.start):
                state[export, 0] = s_HPN.to(state.dtype)
    return (y if D_H is None else y + D_H.to(exact)[:, None] * x).to(x_THP.dtype)


@ssd_scan.fake
def _(x_THP: Tensor, B_TGN: Tensor, state: Tensor) -> Tensor:
    H, G = x_THP.shape[1], B_TGN.shape[1]
    torch._check(H % G == 0, lambda: f"{H} heads are no multiple of {G} groups")
    torch._check(
        tuple(state.shape[2:]) == (H, x_THP.shape[2], B_TGN.shape[2]),
        lambda: f"a state of {tuple(state.shape[2:])} for {H} heads of {x_THP.shape[2]} x {B_TGN.shape[2]}",
    )
    return torch.empty_like(x_THP, memory_format=torch.contiguous_format)
