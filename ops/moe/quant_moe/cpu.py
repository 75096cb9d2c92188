"""quant_moe on the CPU: every expert that was chosen is read once, by all threads; products as in quant_linear."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.op import CallSite
from graphllm.ops.gemm.quant_linear.cpu import integer_kernels, of_integers
from graphllm.ops.moe.fused_moe.operands import LORA_TABLES, ExpertLora, Route
from graphllm.ops.moe.quant_moe.op import QuantExperts, quant_moe

_ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "relu2")  # in the order of cpu/experts.h
_LINES = {torch.int8: 16, torch.uint8: 4}  # of the groups that the kernels are compiled for
_kernels = integer_kernels(
    "graphllm_quant_moe",
    "(Tensor x, Tensor gate_up, Tensor gate_up_scales, Tensor down, Tensor down_scales, Tensor weights,"
    " Tensor experts, Tensor? gate_up_bias, Tensor? down_bias, Tensor? gate_up_a, Tensor? gate_up_b,"
    " Tensor? down_a, Tensor? down_b, Tensor? ids, Tensor(a!) out, SymInt T, SymInt A, SymInt N, SymInt D,"
    " SymInt F, SymInt x_stride, int activation, float limit, int rank) -> ()",
    Path(__file__).with_name("cpu.cpp"),
)


def _supports(site: CallSite) -> bool:
    x_TD, values = site.args["x_TD"], site.args["gate_up_values_NBGLRQ"]
    rest = [t for name, t in site.args.items() if isinstance(t, Tensor) and name != "x_TD"]
    return (
        x_TD.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x_TD.stride(-1) == 1
        and values.shape[3] == _LINES.get(values.dtype)
        and values.dtype == site.args["down_values_NBGLRQ"].dtype
        and all(site.args[f"{of}_scales_NBGR"].dtype == torch.bfloat16 for of in ("gate_up", "down"))
        and site.args["inner"] % 16 == 0
        and site.args["weights_TA"].dtype == torch.float32
        and all(t.is_contiguous() for t in rest)
        # float16 would go through float32, and tables are as they are.
        and all(t.dtype == x_TD.dtype != torch.float16 for n in LORA_TABLES if (t := site.args[n]) is not None)
    )


@quant_moe.impl("cpu_experts", device="cpu", supports=_supports, row_order=of_integers)
def experts_in_turn(x_TD: Tensor, experts: QuantExperts, route: Route, lora: ExpertLora | None = None) -> Tensor:
    """x and the hidden rows are rounded as by the kernel of `quant_linear`, and so are an expert's weights that 32 rows
    of bfloat16 and more chose, with AMX. What each expert gives is rounded to x's dtype. float16 goes through float32.
    """
    taken = torch.float32 if x_TD.dtype == torch.float16 else x_TD.dtype
    x, *biases = (None if t is None else t.to(taken) for t in (x_TD, experts.gate_up_bias_N2F, experts.down_bias_ND))
    assert x is not None
    (T, D), A, values = x.shape, route.experts_TA.shape[1], experts.gate_up_values_NBGLRQ
    out_TD = x.new_empty((T, D))
    _kernels[values.dtype, taken](
        x, *experts[:4], *route, *biases, *(lora or (None,) * 5), out_TD, T, A, values.shape[0], D, experts.inner,
        x.stride(0), _ACTIVATIONS.index(experts.activation), experts.limit, lora.rank if lora else 0,
    )  # fmt: skip
    return out_TD.to(x_TD.dtype)
