"""linear on the CPU: weights in PyTorch's own layout, streamed once from memory for few rows, packed on the way for
many. CPUs with AVX2 but no bfloat16 instructions widen the weights on the way."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite
from graphllm.ops.linear.op import linear

_kernel = CKernel(
    "graphllm_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, SymInt M, SymInt N, SymInt K, SymInt x_stride,"
    " SymInt weight_stride) -> ()",
    Path(__file__).with_name("cpu.cpp"),
)


def _supports(site: CallSite) -> bool:
    tensors = [t for t in site.args.values() if isinstance(t, Tensor)]
    arch = site.target.arch
    return "avx2" in arch and all(t.dtype == torch.bfloat16 and t.stride(-1) == 1 for t in tensors)


@linear.impl("cpu_stream", device="cpu", supports=_supports)
def streaming_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """bfloat16 products with float32 sums, reading the weights once at memory's speed for up to 16 rows of x."""
    out_TO = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))
    _kernel(x_TI, weight_OI, bias_O, out_TO, *out_TO.shape, x_TI.shape[1], x_TI.stride(0), weight_OI.stride(0))
    return out_TO
