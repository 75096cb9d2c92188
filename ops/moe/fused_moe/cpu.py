"""fused_moe on the CPU: every expert that was chosen is read once, by all threads; products as in linear."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite, by_site, each_alone
from graphllm.ops.moe.fused_moe.op import fused_moe
from graphllm.ops.moe.fused_moe.operands import LORA_TABLES, ExpertLora, Experts, Route

_ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "relu2")  # in the order of cpu.cpp
_KERNELS = float_kernels(
    "graphllm_fused_moe",
    "(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor experts, Tensor? gate_up_bias,"
    " Tensor? down_bias, Tensor? gate_up_a, Tensor? gate_up_b, Tensor? down_a, Tensor? down_b, Tensor? ids,"
    " Tensor(a!) out, SymInt T, SymInt A, SymInt N, SymInt D, SymInt F, SymInt x_stride, int activation,"
    " float limit, int rank, bool invariant) -> ()",
    Path(__file__).with_name("cpu.cpp"),
)


def _supports(site: CallSite) -> bool:
    x_TD, weights_TA = site.args["x_TD"], site.args["weights_TA"]
    rest = [t for n, t in site.args.items() if isinstance(t, Tensor) and n != "x_TD"]
    return (
        site.args["form"] == ""
        and site.args["residual_TD"] is None
        and x_TD.dtype in _KERNELS
        and x_TD.stride(-1) == 1
        and weights_TA.dtype == torch.float32
        and all(t.is_contiguous() for t in rest)
        and all(t.dtype == x_TD.dtype for n in LORA_TABLES if (t := site.args[n]) is not None)
    )


@fused_moe.impl("cpu_experts", device="cpu", supports=_supports, configs=by_site, row_order=each_alone)
def experts_in_turn(
    x_TD: Tensor, experts: Experts, route: Route, lora: ExpertLora | None = None, *, invariant: bool = False
) -> Tensor:
    """Tokens are sorted by expert. For bfloat16, gate, up and what each expert gives are rounded to it as well,
    before and after an adapter's product is added."""
    T, A = route.experts_TA.shape
    N, D, F = experts.sizes
    out_TD = x_TD.new_empty((T, D))
    _KERNELS[x_TD.dtype](
        x_TD, *experts.weights, *route, *experts.biases, *(lora or (None,) * 5), out_TD, T, A, N, D, F, x_TD.stride(0),
        _ACTIVATIONS.index(experts.activation), experts.limit, lora.rank if lora else 0, invariant,
    )  # fmt: skip
    return out_TD
