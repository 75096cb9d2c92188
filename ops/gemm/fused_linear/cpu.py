"""fused_linear on the CPU: the gate as the end of `linear`'s kernel, which has both halves in registers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite, by_site, each_alone
from graphllm.ops.gemm.fused_linear.op import fused_linear

_kernel = CKernel(
    "graphllm_linear_gated",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, SymInt M, SymInt N, SymInt K, SymInt x_stride,"
    " SymInt weight_stride, bool invariant) -> ()",
    Path(__file__).parents[1] / "linear" / "cpu.cpp",
)


def _supports(site: CallSite) -> bool:
    args, arch = site.args, site.target.arch
    tensors = [t for name in ("x_TI", "weight_OI", "bias_O") if (t := args[name]) is not None]
    return (
        "avx2" in arch
        and args["gated"]
        and args["norm_I"] is None
        and args["residual_TN"] is None
        and args["a_LRI"] is None
        and all(t.dtype == torch.bfloat16 and t.stride(-1) == 1 for t in tensors)
    )


@fused_linear.impl("cpu_gated", device="cpu", supports=_supports, configs=by_site, row_order=each_alone)
def gated_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """bfloat16 products; with more than few rows they stay in float32 until the gate is applied."""
    out_TN = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0] // 2))
    _kernel(
        x_TI, weight_OI, bias_O, out_TN, *out_TN.shape, x_TI.shape[1], x_TI.stride(0), weight_OI.stride(0), invariant
    )
    return out_TN
