"""scaled_linear by the library's scaled product, a routine that the artifact names."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ir.externs import Extern
from graphllm.ops.gemm.scaled_linear.op import scaled_linear

FEWEST = 257  # rows from which a product is bound by arithmetic
_product = Extern(
    "scaled_product", "(Tensor codes, Tensor row_scales, Tensor weight, Tensor scales, Tensor(a!) out) -> ()"
)


def _supports(site: CallSite) -> bool:
    native = {"sm_89", "sm_90"} & set(site.target.arch) or not site.target.arch
    plain = site.args["residual_TN"] is None and not site.args["gated"]
    return bool(native) and plain and site.args["dtype"] == "bfloat16" and site.rows("codes_TW") >= FEWEST


@scaled_linear.impl("library", device="cuda", supports=_supports)
def library(codes_TW: Tensor, row_scales_T1: Tensor, weight_OW: Tensor, scales_1O: Tensor, dtype: str) -> Tensor:
    """Sums keep 14 bits, which is as much as products of numbers with 4 bits need."""
    out_TO = codes_TW.new_empty((codes_TW.shape[0], weight_OW.shape[0]), dtype=getattr(torch, dtype))
    _product(codes_TW, row_scales_T1, weight_OW, scales_1O, out_TO)
    return out_TO
