"""gated_delta: linear attention whose state forgets by a gate and learns by the delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.recurrent.slots import Slots, border_of, sequences, version_after


def _cost(q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor, at: Slots) -> Cost:
    T, H, V = v_THV.shape
    states = 2 * at.slots.shape[0] * H * V * state.shape[4] * state.element_size()
    return Cost(nbytes(q_TGK, k_TGK, v_THV, v_THV, g, beta_TH) + states, 7 * T * H * V * state.shape[4])


@op(boundary=True, mutates=("state",), cost=_cost)
def gated_delta(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g: Tensor,
    beta_TH: Tensor,
    state: Tensor,
    at: Slots,
    scale: float,
    norm_eps: float = 0.0,
    exports: Tensor | None = None,
) -> Tensor:
    """What the state of each head answers to every token's query: [T, H, V] in v's dtype, contiguous.

    For each token of a sequence, with q, k, v, g and beta of a head, and its state S [V, K]:

        S = S * exp(g);  delta = (v - S k) * beta;  S = S + delta k^T;  out = scale * S q

    in float32, and float64 in float64; the result is rounded once. Rows after the last sequence are padding, and what
    they give is unspecified.

    q_TGK, k_TGK: queries and keys, [T, G, K]. Head h has those of key head h // (H // G).
    v_THV: values, [T, H, V], H a multiple of G. Rows of all three may be strided.
    g: logarithms of decays, at most 0: [T, H], or [T, H, K] for a decay of each key channel.
    beta_TH: how much a value replaces what its key stood for, [T, H].
    state: [N, versions, H, V, K] float32, on a GPU also of 16 bits; entries and versions may be strided.
    norm_eps: where larger than 0, queries and keys are first divided by sqrt(sum of their squares + norm_eps).
    exports: [S] int32, the entry that has the state at `border_of` a sequence's tokens in its first version afterwards;
        negative for none. An implementation that is not `exporting` may leave it alone.

    Source: Yang et al. 2024, "Gated Delta Networks", equation 10; Kimi Team 2025, "Kimi Linear", for decays by channel.
    """
    H, exact = v_THV.shape[1], torch.promote_types(v_THV.dtype, torch.float32)
    out_THV = v_THV.new_zeros(v_THV.shape)

    def of_heads(x_TGK: Tensor) -> Tensor:
        wide = x_TGK.to(exact)
        if norm_eps > 0:
            wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + norm_eps)
        return wide.repeat_interleave(H // wide.shape[1], 1)

    q_THK, k_THK, v, beta = of_heads(q_TGK) * scale, of_heads(k_TGK), v_THV.to(exact), beta_TH.to(exact)
    decay = g.to(exact).exp()[:, :, None]
    decay = decay if g.dim() == 3 else decay[..., None]
    for rows, entry, version, export in sequences(at, exports):
        S_HVK, count = state[entry, version].to(exact), rows.stop - rows.start
        for i, t in enumerate(range(rows.start, rows.stop)):
            S_HVK = S_HVK * decay[t]
            delta_HV = (v[t] - (S_HVK * k_THK[t, :, None]).sum(-1)) * beta[t, :, None]
            S_HVK = S_HVK + delta_HV[..., None] * k_THK[t, :, None]
            out_THV[t] = (S_HVK * q_THK[t, :, None]).sum(-1).to(out_THV.dtype)
            if (kept := version_after(i, count, state.shape[1])) is not None:
                state[entry, kept] = S_HVK.to(state.dtype)
            if export >= 0 and i + 1 == border_of(count):
                state[export, 0] = S_HVK.to(state.dtype)
    return out_THV


@gated_delta.fake
def _(q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor) -> Tensor:
    (G, K), (H, V) = q_TGK.shape[1:], v_THV.shape[1:]
    torch._check(H % G == 0, lambda: f"{H} heads of values, no multiple of {G} heads of keys")
    torch._check(k_TGK.shape[1:] == (G, K), lambda: f"keys {k_TGK.shape} for queries {q_TGK.shape}")
    torch._check(g.shape[1:] in ((H,), (H, K)), lambda: f"gates {g.shape} for {H} heads and {K} channels")
    torch._check(beta_TH.shape[1] == H, lambda: f"beta {beta_TH.shape} for {H} heads")
    torch._check(state.shape[2:] == (H, V, K), lambda: f"a state of {state.shape[2:]} for {(H, V, K)}")
    return v_THV.new_empty(v_THV.shape)
