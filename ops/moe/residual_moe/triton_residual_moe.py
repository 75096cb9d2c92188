"""residual_moe by the kernels of fused_moe, which end with the residual; for one token they begin with the norm."""

# mypy: allow-untyped-defs

from __future__ import annotations

from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.moe.fused_moe import gluon_one_token, gluon_tokens, triton_few_tokens, triton_many_tokens
from graphllm.ops.moe.fused_moe.triton_adapters import lora_of
from graphllm.ops.moe.fused_moe.triton_common import experts_of
from graphllm.ops.moe.fused_moe.tuning import even_routing
from graphllm.ops.moe.residual_moe.op import residual_moe

residual_moe.tuning_inputs(even_routing)


def _plain(site: CallSite) -> bool:
    """Whether the residual is contiguous, and there is no norm."""
    return site.args["norm_D"] is None and site.args["residual_TD"].is_contiguous()


@residual_moe.impl(
    "triton_one",
    device="cuda",
    supports=lambda s: triton_few_tokens.supports_one(s) and s.args["residual_TD"].is_contiguous(),
    configs=triton_few_tokens.configs_of_one,
)
def triton_one(
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
    **config: int,
) -> Tensor:
    """For one token. The normalized row is not rounded."""
    experts = experts_of(gate_up_N2FD, down_NDF, activation, limit, gate_up_bias_N2F, down_bias_ND)
    return triton_few_tokens.one_token(x_TD, experts, weights_TA, experts_TA, config, residual_TD, norm_D, eps)


@residual_moe.impl(
    "triton_few",
    device="cuda",
    supports=lambda s: triton_few_tokens.supports_few(s) and _plain(s),
    configs=triton_few_tokens.configs_of_few,
)
def triton_few(
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
    **config: int,
) -> Tensor:
    """For up to 64 tokens."""
    experts = experts_of(
        gate_up_N2FD, down_NDF, activation, limit, gate_up_bias_N2F, down_bias_ND, gate_up_scales_NG2F,
        gate_up_zeros_NG2F, down_scales_NGD, down_zeros_NGD, form, group,
        lora_of(gate_up_lora_a_LNRD, gate_up_lora_b_LNrO, down_lora_a_LNrF, down_lora_b_LNrD, adapter_ids_T),
    )  # fmt: skip
    return triton_few_tokens.few_tokens(x_TD, experts, weights_TA, experts_TA, config, residual_TD)


residual_moe.impl(
    "gluon_one_token",
    device="cuda",
    supports=lambda s: gluon_one_token.supports_one_token(s) and _plain(s),
    configs=gluon_one_token.one_token_configs,
)(gluon_one_token.gluon_one_token)


residual_moe.impl(
    "gluon_tokens",
    device="cuda",
    supports=lambda s: gluon_tokens.supports_gluon(s) and _plain(s),
    configs=gluon_tokens.gluon_configs,
)(gluon_tokens.gluon_tokens)


@residual_moe.impl(
    "triton_sorted",
    device="cuda",
    supports=lambda s: triton_many_tokens.supports_many(s) and _plain(s),
    configs=triton_many_tokens.configs,
)
def triton_sorted(
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
    **config: int,
) -> Tensor:
    """For more tokens."""
    experts = experts_of(
        gate_up_N2FD, down_NDF, activation, limit, gate_up_bias_N2F, down_bias_ND, gate_up_scales_NG2F,
        gate_up_zeros_NG2F, down_scales_NGD, down_zeros_NGD, form, group,
        lora_of(gate_up_lora_a_LNRD, gate_up_lora_b_LNrO, down_lora_a_LNrF, down_lora_b_LNrD, adapter_ids_T),
    )  # fmt: skip
    return triton_many_tokens.many_tokens(x_TD, experts, weights_TA, experts_TA, config, residual_TD)
