"""quant_moe: `fused_moe` with the experts' matrices as packed integers and scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.gemm.quant_linear.op import dequantize
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.fused_moe.op import distinct_experts, lora_cost
from graphllm.ops.moe.fused_moe.operands import LORA_TABLES, ExpertLora, Experts, Route, parts_of


class QuantExperts(NamedTuple):
    """`Experts` with packed integers as matrices.

    gate_up_values_NBGLRQ, gate_up_scales_NBGR: for each expert a matrix [2F, D] as `quant_linear` has it.
    down_values_NBGLRQ, down_scales_NBGR: for each expert a matrix [D, F].
    inner: F, a multiple of 16, so that blocks of 16 rows hold gates or ups.
    activation, limit, gate_up_bias_N2F, down_bias_ND: as in `Experts`.
    """

    gate_up_values_NBGLRQ: Tensor
    gate_up_scales_NBGR: Tensor
    down_values_NBGLRQ: Tensor
    down_scales_NBGR: Tensor
    inner: int
    activation: str = "silu"
    limit: float = 0.0
    gate_up_bias_N2F: Tensor | None = None
    down_bias_ND: Tensor | None = None


def _cost(x_TD: Tensor, experts: QuantExperts, route: Route, lora: ExpertLora | None) -> Cost:
    T, A = route.experts_TA.shape
    N, D = experts.gate_up_values_NBGLRQ.shape[0], x_TD.shape[1]
    own = (*experts[:4], experts.gate_up_bias_N2F, experts.down_bias_ND)
    of_one = nbytes(*(t[:1] for t in own if t is not None))
    tables = lora_cost(T, A, lora)
    read = int(distinct_experts(T, N, A) * of_one) + tables.bytes
    flops = 2 * (parts_of(experts.activation) + 1) * T * A * D * experts.inner
    return Cost(read + 2 * nbytes(x_TD) + nbytes(*route), flops + tables.flops)


@op(cost=_cost, rowwise=True, neutral=("adapter_ids_T", LORA_TABLES))
def quant_moe(x_TD: Tensor, experts: QuantExperts, route: Route, lora: ExpertLora | None = None) -> Tensor:
    """`fused_moe` of the exact matrices that each expert's values and scales stand for, [T, D] in x's dtype.

    x_TD [T, D]. The other arguments are as for `fused_moe`.
    """
    N, D = experts.gate_up_values_NBGLRQ.shape[0], x_TD.shape[1]
    wide = torch.promote_types(x_TD.dtype, torch.float32)

    def stack(values: Tensor, scales: Tensor, rows: int, width: int) -> Tensor:
        return torch.stack([dequantize(values[n], scales[n], rows, width).to(wide) for n in range(N)])

    rows = parts_of(experts.activation) * experts.inner
    gate_up = stack(experts.gate_up_values_NBGLRQ, experts.gate_up_scales_NBGR, rows, D)
    down = stack(experts.down_values_NBGLRQ, experts.down_scales_NBGR, D, experts.inner)
    first, second = (None if t is None else t.to(wide) for t in (experts.gate_up_bias_N2F, experts.down_bias_ND))
    plain = Experts(gate_up, down, experts.activation, experts.limit, first, second)
    if lora is not None:
        lora = lora._replace(**{name: getattr(lora, name).to(wide) for name in LORA_TABLES})
    return fused_moe.reference(x_TD.to(wide), plain, route, lora).to(x_TD.dtype)


@quant_moe.fake
def _(x_TD: Tensor) -> Tensor:
    return x_TD.new_empty(x_TD.shape)
