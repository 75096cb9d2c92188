"""quant_moe on the CPU: every expert that was chosen is read once, by all threads; products as in quant_linear."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite
from graphllm.ops.gemm.quant_linear.cpu import of_integers
from graphllm.ops.moe.fused_moe.op import LORA_TABLES
from graphllm.ops.moe.quant_moe.op import quant_moe

_ACTIVATIONS = ("silu", "gelu_tanh", "clamped")  # in the order of cpu/experts.h
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_LINES = {torch.int8: 16, torch.uint8: 4}  # of the groups that the kernels are compiled for
_kernels = {
    (values, x): CKernel(
        f"graphllm_quant_moe_{name}_{kind}",
        "(Tensor x, Tensor gate_up, Tensor gate_up_scales, Tensor down, Tensor down_scales, Tensor weights,"
        " Tensor experts, Tensor? gate_up_bias, Tensor? down_bias, Tensor? gate_up_a, Tensor? gate_up_b,"
        " Tensor? down_a, Tensor? down_b, Tensor? ids, Tensor(a!) out, SymInt T, SymInt A, SymInt N, SymInt D,"
        " SymInt F, SymInt x_stride, int activation, float limit, int rank) -> ()",
        Path(__file__).with_name("cpu.cpp"),
    )
    for values, name in ((torch.int8, "int8"), (torch.uint8, "int4"))
    for x, kind in _DTYPES.items()
}


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
def experts_in_turn(
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
    """x and the hidden rows are rounded as by the kernel of `quant_linear`, and so are an expert's weights that 32 rows
    of bfloat16 and more chose, with AMX. What each expert gives is rounded to x's dtype. float16 goes through float32.
    """
    taken = torch.float32 if x_TD.dtype == torch.float16 else x_TD.dtype
    x, *biases = (None if t is None else t.to(taken) for t in (x_TD, gate_up_bias_N2F, down_bias_ND))
    assert x is not None
    (T, D), A, N = x.shape, experts_TA.shape[1], gate_up_values_NBGLRQ.shape[0]
    out_TD = x.new_empty((T, D))
    _kernels[gate_up_values_NBGLRQ.dtype, taken](
        x, gate_up_values_NBGLRQ, gate_up_scales_NBGR, down_values_NBGLRQ, down_scales_NBGR, weights_TA, experts_TA,
        *biases, gate_up_lora_a_LNRD, gate_up_lora_b_LNrO, down_lora_a_LNrF, down_lora_b_LNrD, adapter_ids_T, out_TD,
        T, A, N, D, inner, x.stride(0), _ACTIVATIONS.index(activation), limit,
        0 if down_lora_a_LNrF is None else down_lora_a_LNrF.shape[2],
    )  # fmt: skip
    return out_TD.to(x_TD.dtype)
