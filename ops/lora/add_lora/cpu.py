"""add_lora on the CPU: rows of one adapter read its tables once, in one parallel region."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.lora.add_lora.op import add_lora
from graphllm.ops.lora.add_lora.operands import LowRank

_PARTS = 6  # matrices of a layer that the kernel's arguments have room for

_kernel = CKernel(
    "graphllm_add_lora",
    "(Tensor y, Tensor x, Tensor a, Tensor b, Tensor ids, Tensor(a!) low, Tensor(b!) out, SymInt T, SymInt I, SymInt O,"
    " SymInt L, SymInt rank, SymInt y_stride, SymInt x_stride,"
    " int w0, int w1, int w2, int w3, int w4, int w5) -> ()",
    Path(__file__).with_name("cpu.cpp"),
    usual=False,
)


def _supports(site: CallSite) -> bool:
    tensors = [site.args[name] for name in ("y_TO", "x_TI", "a_LRI", "b_LrO")]
    same = all(t.dtype == torch.bfloat16 for t in tensors)
    dense = all(t.stride(-1) == 1 for t in tensors[:2]) and all(t.is_contiguous() for t in tensors[2:])
    return "avx2" in site.target.arch and same and dense and len(site.args["widths"]) <= _PARTS


@add_lora.impl("cpu_add_lora", device="cpu", supports=_supports, row_order=each_alone)
def grouped_add_lora(y_TO: Tensor, x_TI: Tensor, lora: LowRank) -> Tensor:
    """bfloat16 products with float32 sums."""
    a_LRI, b_LrO, adapter_ids_T, widths = lora
    (L, R, inner), T = a_LRI.shape, x_TI.shape[0]
    low_TR = x_TI.new_empty((T, R), dtype=torch.float32)
    out_TO = y_TO.new_empty(y_TO.shape)
    places = [*widths, *[0] * (_PARTS - len(widths))]
    _kernel(
        y_TO, x_TI, a_LRI, b_LrO, adapter_ids_T, low_TR, out_TO, T, inner, y_TO.shape[1], L, b_LrO.shape[1],
        y_TO.stride(0), x_TI.stride(0), *places,
    )  # fmt: skip
    return out_TO
