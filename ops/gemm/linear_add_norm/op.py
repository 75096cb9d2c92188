"""linear_add_norm: a linear layer that ends a residual branch, and the norm that begins the next one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ir.groups import TENSOR
from graphllm.ops.collectives.all_reduce import all_reduce
from graphllm.ops.gemm.linear import linear
from graphllm.ops.gemm.linear.operands import Matrix
from graphllm.ops.lora.add_lora.op import adapted, table_cost
from graphllm.ops.lora.add_lora.operands import LowRank
from graphllm.ops.norms.rms_norm import rms_norm


class AddNorm(NamedTuple):
    """What follows the product.

    residual_TO: added to it, [T, O].
    norm_O: the weight of the `rms_norm` of the sum, with offset 0, [O].
    eps: of that norm.
    """

    residual_TO: Tensor
    norm_O: Tensor
    eps: float


def _cost(x_TI: Tensor, matrix: Matrix, after: AddNorm, lora: LowRank | None) -> Cost:
    read = nbytes(x_TI, *matrix.tensors, after.residual_TO, after.norm_O)
    tables, out = table_cost(x_TI.shape[0], lora), after.residual_TO
    return Cost(read + 2 * nbytes(out) + tables.bytes, 2 * out.numel() * x_TI.shape[1] + tables.flops)


@op(cost=_cost, rowwise=True)
def linear_add_norm(
    x_TI: Tensor, matrix: Matrix, after: AddNorm, lora: LowRank | None = None, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """sum = residual + x @ weight.T + bias, and `rms_norm` of it: two tensors [T, O] in x's dtype, contiguous.

    x_TI [T, I]. lora: if given, the product with the weight is followed by `add_lora`. ranks: if more than one, all
    this but the residual is summed over the ranks of the tensor-parallel group, by `all_reduce`. Products accumulate in
    float32 (float64 for float64 inputs). An implementation may add in float32 and round once; the reference rounds the
    product first. The norm is that of the rounded sum.
    """
    product_TO = adapted(linear.reference(x_TI, matrix), x_TI, lora)
    if ranks > 1:
        product_TO = all_reduce.reference(product_TO, TENSOR, ranks)
    sum_TO = after.residual_TO + product_TO
    return sum_TO, rms_norm.reference(sum_TO, after.norm_O, after.eps)


@linear_add_norm.fake  # the reference may need other processes
def _(residual_TO: Tensor) -> tuple[Tensor, Tensor]:
    sum_TO = torch.empty_like(residual_TO, memory_format=torch.contiguous_format)
    return sum_TO, torch.empty_like(sum_TO)
