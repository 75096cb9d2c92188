"""linear on the CPU: weights in PyTorch's own layout, streamed once from memory for few rows, packed on the way for
many. CPUs with AVX2 but no bfloat16 instructions widen bfloat16 weights on the way. MKL, which is what torch calls for
float32, has half of the speed on AMD's processors, and less for few rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite, by_site, each_alone
from graphllm.ops.gemm.linear.op import linear

_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, SymInt M, SymInt N, SymInt K, SymInt x_stride,"
    " SymInt weight_stride, bool invariant) -> ()"
)
_kernel = CKernel("graphllm_linear", _SCHEMA, Path(__file__).with_name("cpu.cpp"))
_float_kernel = CKernel("graphllm_linear_float", _SCHEMA, Path(__file__).with_name("cpu_float.cpp"), usual=False)


def _all_of(site: CallSite, dtype: torch.dtype) -> bool:
    tensors = [t for t in site.args.values() if isinstance(t, Tensor)]
    return "avx2" in site.target.arch and all(t.dtype == dtype and t.stride(-1) == 1 for t in tensors)


def _supports(site: CallSite) -> bool:
    return _all_of(site, torch.bfloat16)


def _supports_float(site: CallSite) -> bool:
    return _all_of(site, torch.float32)


@linear.impl("cpu_stream", device="cpu", supports=_supports, configs=by_site, row_order=each_alone)
def streaming_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, invariant: bool = False
) -> Tensor:
    """bfloat16 products with float32 sums, reading the weights once at memory's speed for up to 16 rows of x."""
    out_TO = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))
    _kernel(
        x_TI, weight_OI, bias_O, out_TO, *out_TO.shape, x_TI.shape[1], x_TI.stride(0), weight_OI.stride(0), invariant
    )
    return out_TO


@linear.impl("cpu_float", device="cpu", supports=_supports_float, configs=by_site, row_order=each_alone)
def float_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """float32 products and sums; weights are read once by few rows of x, and packed on the way for many."""
    out_TO = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))
    _float_kernel(
        x_TI, weight_OI, bias_O, out_TO, *out_TO.shape, x_TI.shape[1], x_TI.stride(0), weight_OI.stride(0), invariant
    )
    return out_TO
