"""quant_moe: `fused_moe` with the experts' matrices as packed integers and scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.gemm.quant_linear.op import dequantize
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.fused_moe.op import LORA_TABLES, distinct_experts, lora_cost


def _cost(
    x_TD: Tensor, gate_up_values_NBGLRQ: Tensor, gate_up_scales_NBGR: Tensor, down_values_NBGLRQ: Tensor,
    down_scales_NBGR: Tensor, weights_TA: Tensor, experts_TA: Tensor, inner: int, gate_up_bias_N2F: Tensor | None,
    down_bias_ND: Tensor | None, **others: Any,
) -> Cost:  # fmt: skip
    T, A = experts_TA.shape
    N, D = gate_up_values_NBGLRQ.shape[0], x_TD.shape[1]
    stacks = (gate_up_values_NBGLRQ, gate_up_scales_NBGR, down_values_NBGLRQ, down_scales_NBGR)
    of_one = nbytes(*(t[:1] for t in (*stacks, gate_up_bias_N2F, down_bias_ND) if t is not None))
    tables = lora_cost(T, A, others)
    read = int(distinct_experts(T, N, A) * of_one) + tables.bytes
    return Cost(read + 2 * nbytes(x_TD) + nbytes(weights_TA, experts_TA), 6 * T * A * D * inner + tables.flops)


@op(cost=_cost, rowwise=True, neutral=("adapter_ids_T", LORA_TABLES))
def quant_moe(
    x_TD: Tensor,
    gate_up_values_NBGLRQ: Tensor,
    gate_up_scales_NBGR: Tensor,
    down_values_NBGLRQ: Tensor,
    down_scales_NBGR: Tensor,
    weights_TA: Tensor,
    experts_TA: Tensor,
    inner: int,
    activation: str = "silu",
    limit: float = 0.0,
    gate_up_bias_N2F: Tensor | None = None,
    down_bias_ND: Tensor | None = None,
    gate_up_lora_a_LNRD: Tensor | None = None,
    gate_up_lora_b_LNrO: Tensor | None = None,
    down_lora_a_LNrF: Tensor | None = None,
    down_lora_b_LNrD: Tensor | None = None,
    adapter_ids_T: Tensor | None = None,
) -> Tensor:
    """`fused_moe` of the exact matrices that each expert's values and scales stand for, [T, D] in x's dtype.

    Values and scales of one expert are those of `quant_linear`: gate_up a matrix [2F, D], down [D, F]. inner: F, a
    multiple of 16, so that blocks of 16 rows hold gates or ups. The other arguments are those of `fused_moe`.
    """
    N, D = gate_up_values_NBGLRQ.shape[0], x_TD.shape[1]
    wide = torch.promote_types(x_TD.dtype, torch.float32)

    def stack(values: Tensor, scales: Tensor, rows: int, width: int) -> Tensor:
        return torch.stack([dequantize(values[n], scales[n], rows, width).to(wide) for n in range(N)])

    def widened(*tensors: Tensor | None) -> list[Tensor | None]:
        return [None if t is None else t.to(wide) for t in tensors]

    tables = (gate_up_lora_a_LNRD, gate_up_lora_b_LNrO, down_lora_a_LNrF, down_lora_b_LNrD)
    return fused_moe.reference(
        x_TD.to(wide),
        stack(gate_up_values_NBGLRQ, gate_up_scales_NBGR, 2 * inner, D),
        stack(down_values_NBGLRQ, down_scales_NBGR, D, inner),
        *(weights_TA, experts_TA, activation, limit, *widened(gate_up_bias_N2F, down_bias_ND)),
        **dict(zip(LORA_TABLES, widened(*tables), strict=True)),
        adapter_ids_T=adapter_ids_T,
    ).to(x_TD.dtype)


@quant_moe.fake
def _(x_TD: Tensor) -> Tensor:
    return x_TD.new_empty(x_TD.shape)
