"""fused_linear: what surrounds a linear layer in a decoder (norm before it, gate and residual after it) in one op."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.gemm.linear import linear
from graphllm.ops.gemm.linear.operands import Matrix, Norm
from graphllm.ops.lora.add_lora.op import adapted, table_cost
from graphllm.ops.lora.add_lora.operands import LowRank
from graphllm.ops.norms.rms_norm import rms_norm

MOST_ROWS = 256  # beyond, products are bound by arithmetic and left to the library


def _cost(
    x_TI: Tensor, matrix: Matrix, norm_I: Tensor | None, residual_TN: Tensor | None, gated: bool, lora: LowRank | None
) -> Cost:
    products = x_TI.shape[0] * matrix.width(False)
    written = products // (2 if gated else 1) * x_TI.element_size()
    tables = table_cost(x_TI.shape[0], lora)
    read = nbytes(x_TI, *matrix.tensors, norm_I, residual_TN)
    return Cost(read + written + tables.bytes, 2 * products * x_TI.shape[1] + tables.flops)


@op(cost=_cost, rowwise=True)
def fused_linear(
    x_TI: Tensor,
    matrix: Matrix,
    before: Norm | None = None,
    residual_TN: Tensor | None = None,
    gated: bool = False,
    lora: LowRank | None = None,
) -> Tensor:
    """residual + gate(norm(x) @ weight.T + bias): [T, N] in x's dtype, contiguous.

    x_TI [T, I]. before: if given, x is first normalized by it. gated: the results are a gate and a value half; `swiglu`
    makes N = O / 2 of them; else N = O. residual_TN [T, N]: added last. lora: if given, the product with the weight is
    followed by `add_lora`. Products accumulate in float32 (float64 for float64 inputs). An implementation may keep
    float32 between the steps; the reference rounds to x's dtype after each.
    """
    if before is not None:
        x_TI = rms_norm.reference(x_TI, *before)
    out_TN = adapted(linear.reference(x_TI, matrix), x_TI, lora)
    if gated:
        out_TN = swiglu.reference(out_TN)
    return out_TN if residual_TN is None else residual_TN + out_TN


@fused_linear.fake(traceable=True)
def _(x_TI: Tensor, matrix: Matrix, gated: bool) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], matrix.width(gated))
