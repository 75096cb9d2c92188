"""causal_conv: a short convolution over the tokens of each sequence, as recurrent layers have before their scan."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.recurrent.slots import Slots
from graphllm.program.schema import BORDER


def _cost(x_TD: Tensor, weight_DW: Tensor, at: Slots) -> Cost:
    D, W = weight_DW.shape
    rows = 2 * at.slots.shape[0] * (W - 1) * D * x_TD.element_size()
    return Cost(2 * nbytes(x_TD) + nbytes(weight_DW) + rows, 2 * x_TD.shape[0] * D * W)


@op(cost=_cost, mutates=("state",))
def causal_conv(
    x_TD: Tensor,
    weight_DW: Tensor,
    state: Tensor,
    at: Slots,
    bias_D: Tensor | None = None,
    activation: str = "silu",
    exports: Tensor | None = None,
) -> Tensor:
    """Each channel's sum of its last W inputs, weighed: [T, D] in x's dtype, contiguous.

    out[t] = activation(bias + sum over j < W of weight[:, j] * x[t - W + 1 + j]), in float32, rounded once. Inputs
    before the step are the rows of the state, zeros where the sequence begins.

    x_TD: [T, D], rows may be strided. Rows after the last sequence are padding, and what they give is unspecified.
    weight_DW: [D, W], the oldest input first, W at least 2.
    state: [N, versions, W - 1, D] in x's dtype, the last W - 1 inputs of each sequence, the oldest first.
    bias_D: [D].
    activation: "silu", or "" for none.
    exports: [S] int32, the entry that has the state at `border_of` a sequence's tokens in its first version afterwards;
        negative for none. An implementation that is not `exporting` may leave it alone.

    Source: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3.4.
    """
    T, W, versions = x_TD.shape[0], weight_DW.shape[1], state.shape[1]
    starts = at.query_start_loc
    t = torch.arange(T, device=x_TD.device)
    s = (t[:, None] >= starts[None, 1:]).sum(1).clamp(max=starts.shape[0] - 2)
    i, count, owned = t - starts[s], starts[s + 1] - starts[s], t < starts[-1]
    entry, version = at.slots.long()[s], at.state_versions.long()[s]
    before = state[entry, version]
    rows = []
    for back in range(W - 1, -1, -1):
        old = before[t, (W - 1 - back + i).clamp(0, W - 2)]
        rows.append(torch.where((i >= back)[:, None], x_TD[(t - back).clamp(min=0)], old))
    exact = torch.promote_types(x_TD.dtype, torch.float32)
    out = (torch.stack(rows).to(exact) * weight_DW.t().to(exact)[:, None]).sum(0)
    if bias_D is not None:
        out = out + bias_D.to(exact)
    if activation == "silu":
        out = torch.nn.functional.silu(out)
    kept = owned & ((i == count - 1) | (count <= versions))
    kept_at = torch.where(kept, entry, state.shape[0] - 1), torch.where(kept, i.clamp(max=versions - 1), 0)
    state.index_put_(kept_at, torch.stack(rows[1:], 1))
    if exports is not None:
        to = exports.long()[s]
        kept = owned & (to >= 0) & (i + 1 == (count - 1) // BORDER * BORDER)
        kept_at = torch.where(kept, to, state.shape[0] - 1), torch.zeros_like(to)
        state.index_put_(kept_at, torch.stack(rows[1:], 1))
    return out.to(x_TD.dtype)


@causal_conv.fake(traceable=True)
def _(x_TD: Tensor, weight_DW: Tensor, state: Tensor, activation: str) -> Tensor:
    D, W = weight_DW.shape
    torch._check(activation in ("silu", ""), lambda: f'activation {activation!r}: use "silu" or ""')
    torch._check(x_TD.shape[1] == D, lambda: f"weights of {D} channels, rows of {x_TD.shape[1]}")
    torch._check(state.shape[2] == W - 1, lambda: f"a state of {state.shape[2]} rows, weights for {W}")
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
