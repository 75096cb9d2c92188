"""gated_rms_norm: the norm behind a recurrent layer's scan, with its gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from graphllm.ir import Cost, nbytes, op


def _cost(x_TD: Tensor, weight_E: Tensor) -> Cost:
    return Cost(3 * nbytes(x_TD) + nbytes(weight_E), 9 * x_TD.numel())


@op(cost=_cost, rowwise=True)
def gated_rms_norm(
    x_TD: Tensor, gate_TD: Tensor, weight_E: Tensor, groups: int, eps: float, gate_first: bool, parts: int = 1
) -> Tensor:
    """Groups of each row at unit root mean square, times weight and silu(gate): [T, D] in x's dtype, contiguous.

    gate_first: the row is gated before it is normalized, else after that. The normalized row is rounded to x's dtype
    before the weight is applied. All else is float32; float64 where x is.

    x_TD, gate_TD: [T, D], rows may be strided.
    weight_E: [D], or [D / groups] for all groups alike.
    parts: ranks of tensor parallelism that have a part of each group. Here only this one counts; the pass `shard` puts
        in the sum over all of them.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7; Zhang and Sennrich 2019.
    """
    exact = torch.promote_types(x_TD.dtype, torch.float32)
    x, gate = x_TD.to(exact), silu(gate_TD.to(exact))
    if gate_first:
        x = x * gate
    grouped = x.unflatten(1, (groups, x.shape[1] // groups))
    grouped = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)).to(x_TD.dtype)
    normed = grouped.flatten(1) * weight_E if weight_E.shape[0] == x.shape[1] else (grouped * weight_E).flatten(1)
    return (normed if gate_first else normed * gate).to(x_TD.dtype).contiguous()


@gated_rms_norm.fake(traceable=True)
def _(x_TD: Tensor, gate_TD: Tensor, weight_E: Tensor, groups: int) -> Tensor:
    D, E = x_TD.shape[1], weight_E.shape[0]
    torch._check(gate_TD.shape[1] == D, lambda: f"a gate of {gate_TD.shape[1]} for rows of {D}")
    torch._check(D % groups == 0 and E in (D, D // groups), lambda: f"weight {E} for {groups} groups in rows of {D}")
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
