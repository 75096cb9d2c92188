"""linear_chain: the linear layers from one attention to the next, with norms, gate and residuals, in one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.fused_linear import fused_linear


def _cost(
    x_TA: Tensor, residual_TD: Tensor, o_DA: Tensor, gate_up_2FD: Tensor, down_DF: Tensor, qkv_QD: Tensor, **others: Any
) -> Cost:
    weights = (o_DA, gate_up_2FD, down_DF, qkv_QD)
    read = nbytes(x_TA, residual_TD, *weights, *(others[n] for n in ("norm_D", "next_norm_D", "bias_Q")))
    T = x_TA.shape[0]
    written = nbytes(residual_TD) + T * qkv_QD.shape[0] * x_TA.element_size()
    return Cost(read + written, 2 * T * sum(w.numel() for w in weights))


@op(cost=_cost, rowwise=True)
def linear_chain(
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
) -> tuple[Tensor, Tensor]:
    """What follows an attention, up to the next one: the residual stream behind the layer [T, D], and the next layer's
    queries, keys and values [T, Q], each as four calls of `fused_linear` make them:

    y = residual + x @ o.T; out = y + gated(norm(y) @ gate_up.T) @ down.T; qkv = norm(out) @ qkv.T + bias.

    x_TA [T, A]: of attention. residual_TD [T, D]: what the layer was given. norm_D, next_norm_D [D]: weights of norms
    with eps and next_eps. bias_Q [Q]: optional. An implementation may keep float32 between the steps, but for y and
    out, which are rounded to x's dtype; the reference rounds after each.
    """
    y_TD = fused_linear.reference(x_TA, o_DA, residual_TN=residual_TD)
    gated_TF = fused_linear.reference(y_TD, gate_up_2FD, norm_I=norm_D, eps=eps, gated=True)
    out_TD = fused_linear.reference(gated_TF, down_DF, residual_TN=y_TD)
    return out_TD, fused_linear.reference(out_TD, qkv_QD, bias_Q, next_norm_D, next_eps)
