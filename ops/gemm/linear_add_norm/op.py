"""linear_add_norm: a linear layer that ends a residual branch, and the norm that begins the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ir.groups import TENSOR
from graphllm.ops.collectives.all_reduce import all_reduce
from graphllm.ops.gemm.linear import linear
from graphllm.ops.lora.add_lora.op import adapted, table_cost
from graphllm.ops.norms.rms_norm import rms_norm


def _cost(
    x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor, norm_O: Tensor, bias_O: Tensor | None,
    scales_GO: Tensor | None, zeros_GO: Tensor | None, a_LRI: Tensor | None, b_LrO: Tensor | None,
) -> Cost:  # fmt: skip
    read = nbytes(x_TI, weight_OI, bias_O, residual_TO, norm_O, scales_GO, zeros_GO)
    tables = table_cost(x_TI.shape[0], a_LRI, b_LrO)
    return Cost(read + 2 * nbytes(residual_TO) + tables.bytes, 2 * residual_TO.numel() * x_TI.shape[1] + tables.flops)


@op(cost=_cost, rowwise=True)
def linear_add_norm(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    bias_O: Tensor | None = None,
    scales_GO: Tensor | None = None,
    zeros_GO: Tensor | None = None,
    form: str = "",
    group: int = 0,
    a_LRI: Tensor | None = None,
    b_LrO: Tensor | None = None,
    adapter_ids_T: Tensor | None = None,
    widths: list[int] | None = None,
    ranks: int = 1,
) -> tuple[Tensor, Tensor]:
    """sum = residual + x @ weight.T + bias, and `rms_norm` of it: two tensors [T, O] in x's dtype, contiguous.

    x_TI [T, I], weight_OI [O, I], residual_TO [T, O], norm_O [O] applied with offset 0, bias_O [O].
    scales_GO, zeros_GO, form, group: as for `linear`. a_LRI, b_LrO, adapter_ids_T, widths: if given, the product with
    the weight is followed by `add_lora`. ranks: if more than one, all this but the residual is summed over the ranks of
    the tensor-parallel group, by `all_reduce`. Products accumulate in float32 (float64 for float64 inputs). An
    implementation may add in float32 and round once; the reference rounds the product first. The norm is that of the
    rounded sum.
    """
    product_TO = linear.reference(x_TI, weight_OI, bias_O, scales_GO, zeros_GO, form, group)
    product_TO = adapted(product_TO, x_TI, a_LRI, b_LrO, adapter_ids_T, widths)
    if ranks > 1:
        product_TO = all_reduce.reference(product_TO, TENSOR, ranks)
    sum_TO = residual_TO + product_TO
    return sum_TO, rms_norm.reference(sum_TO, norm_O, eps)


@linear_add_norm.fake  # the reference may need other processes
def _(residual_TO: Tensor) -> tuple[Tensor, Tensor]:
    sum_TO = torch.empty_like(residual_TO, memory_format=torch.contiguous_format)
    return sum_TO, torch.empty_like(sum_TO)
