"""quant_linear on the CPU: the weights are read once as a stream, and rows of x are rounded to int8 on the way.

Integer products need a fraction of the instructions of bfloat16 products of weights that are widened on the fly (this
was counted, that kernel was not written). bench/notes/cpu_quantized.md has their speed and what the rounding of x
costs in accuracy. With AMX, steps of 32 and more rows of bfloat16 keep x: there products of bfloat16 are the fastest,
and widening a weight is shared by all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.gemm.quant_linear.op import quant_linear

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_LINES = {torch.int8: 16, torch.uint8: 4}  # of the groups that the kernels are compiled for


def integer_kernels(symbol: str, schema: str, source: Path) -> dict[tuple[torch.dtype, torch.dtype], CKernel]:
    """A kernel for each dtype of packed values and of x."""
    return {
        (values, x): CKernel(f"{symbol}_{name}_{kind}", schema, source)
        for values, name in ((torch.int8, "int8"), (torch.uint8, "int4"))
        for x, kind in _DTYPES.items()
    }


_kernels = integer_kernels(
    "graphllm_quant_linear",
    "(Tensor x, Tensor values, Tensor scales, Tensor? bias, Tensor(a!) out, SymInt M, SymInt N, SymInt K,"
    " SymInt x_stride, bool gated) -> ()",
    Path(__file__).with_name("cpu.cpp"),
)


def _supports(site: CallSite) -> bool:
    x_TI, values, scales = site.args["x_TI"], site.args["values_BGLRQ"], site.args["scales_BGR"]
    return (
        x_TI.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and scales.dtype == torch.bfloat16
        and values.shape[2] == _LINES.get(values.dtype)
        and x_TI.stride(-1) == 1
        and values.is_contiguous()
        and scales.is_contiguous()
        and not (site.args["gated"] and site.args["rows"] % 32)  # the halves are of whole blocks
    )


def of_integers(site: CallSite, constants: Mapping[str, Any]) -> str:
    """Each row is computed independently, but AMX does not round the rows of a step, or an expert, that has many."""
    x = site.args["x_TI"] if "x_TI" in site.args else site.args["x_TD"]
    return "" if "amx_bf16" in site.target.arch and x.dtype == torch.bfloat16 else each_alone(site, constants)


@quant_linear.impl("cpu_stream", device="cpu", supports=_supports, row_order=of_integers)
def streaming_quant_linear(
    x_TI: Tensor, values_BGLRQ: Tensor, scales_BGR: Tensor, rows: int, bias_O: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Each group of x's entries is rounded to multiples of a 127th of its largest; integer products of a group are
    exact, and its sum is scaled and added in float32. With AMX, for 32 rows of bfloat16 and more, x is taken as it is
    and scaled weights are rounded to bfloat16. float16 goes through float32."""
    taken = torch.float32 if x_TI.dtype == torch.float16 else x_TI.dtype
    x, bias = x_TI.to(taken), None if bias_O is None else bias_O.to(taken)
    out = x.new_empty((x.shape[0], rows // 2 if gated else rows))
    kernel = _kernels[values_BGLRQ.dtype, taken]
    kernel(x, values_BGLRQ, scales_BGR, bias, out, x.shape[0], rows, x.shape[1], x.stride(0), gated)
    return out.to(x_TI.dtype)
