"""residual_moe: what experts add to the residual, and the norm before them where it is computed with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.norms.rms_norm import rms_norm


def _cost(residual_TD: Tensor, norm_D: Tensor | None, **others: Any) -> Cost:
    experts = fused_moe.cost(**{n: others[n] for n in fused_moe.signature.parameters})
    return Cost(experts.bytes + nbytes(residual_TD, norm_D), experts.flops)


@op(cost=_cost, rowwise=True)
def residual_moe(
    residual_TD: Tensor,
    x_TD: Tensor,
    gate_up_N2FD: Tensor,
    down_NDF: Tensor,
    weights_TA: Tensor,
    experts_TA: Tensor,
    activation: str = "silu",
    limit: float = 0.0,
    gate_up_bias_N2F: Tensor | None = None,
    down_bias_ND: Tensor | None = None,
    norm_D: Tensor | None = None,
    eps: float = 0.0,
    gate_up_scales_NG2F: Tensor | None = None,
    gate_up_zeros_NG2F: Tensor | None = None,
    down_scales_NGD: Tensor | None = None,
    down_zeros_NGD: Tensor | None = None,
    form: str = "",
    group: int = 0,
    gate_up_lora_a_LNRD: Tensor | None = None,
    gate_up_lora_b_LNrO: Tensor | None = None,
    down_lora_a_LNrF: Tensor | None = None,
    down_lora_b_LNrD: Tensor | None = None,
    adapter_ids_T: Tensor | None = None,
) -> Tensor:
    """residual + `fused_moe` of x, or of its `rms_norm` where norm_D [D] is given: [T, D] in x's dtype, contiguous.

    residual_TD [T, D] in x's dtype; the rest as for `fused_moe`, the norm with offset 0. An implementation may add in
    float32 and round once, and leave the normalized rows unrounded.
    """
    if norm_D is not None:
        x_TD = rms_norm.reference(x_TD, norm_D, eps)
    return residual_TD + fused_moe.reference(
        x_TD, gate_up_N2FD, down_NDF, weights_TA, experts_TA, activation, limit, gate_up_bias_N2F, down_bias_ND,
        gate_up_scales_NG2F, gate_up_zeros_NG2F, down_scales_NGD, down_zeros_NGD, form, group,
        gate_up_lora_a_LNRD, gate_up_lora_b_LNrO, down_lora_a_LNrF, down_lora_b_LNrD, adapter_ids_T,
    )  # fmt: skip


@residual_moe.fake
def _(x_TD: Tensor) -> Tensor:
    return x_TD.new_empty(x_TD.shape)
