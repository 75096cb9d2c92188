"""fused_linear: what surrounds a linear layer in a decoder (norm before it, gate and residual after it) in one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.gemm.linear import linear
from graphllm.ops.lora.add_lora.op import adapted, table_cost
from graphllm.ops.norms.rms_norm import rms_norm

MOST_ROWS = 256  # beyond, products are bound by arithmetic and left to the library


def _cost(x_TI: Tensor, weight_OI: Tensor, gated: bool, **others: Any) -> Cost:
    products = x_TI.shape[0] * weight_OI.shape[0]
    written = products // (2 if gated else 1) * x_TI.element_size()
    read = nbytes(x_TI, weight_OI, *(others[n] for n in ("bias_O", "norm_I", "residual_TN", "scales_GO", "zeros_GO")))
    tables = table_cost(x_TI.shape[0], others["a_LRI"], others["b_LrO"])
    return Cost(read + written + tables.bytes, 2 * products * x_TI.shape[1] + tables.flops)


@op(cost=_cost, rowwise=True)
def fused_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    gated: bool = False,
    scales_GO: Tensor | None = None,
    zeros_GO: Tensor | None = None,
    form: str = "",
    group: int = 0,
    a_LRI: Tensor | None = None,
    b_LrO: Tensor | None = None,
    adapter_ids_T: Tensor | None = None,
    widths: list[int] | None = None,
) -> Tensor:
    """residual + gate(norm(x) @ weight.T + bias): [T, N] in x's dtype, contiguous.

    x_TI [T, I]; weight_OI [O, I]; bias_O [O]. norm_I [I]: if given, x is first normalized as by `rms_norm` with ``eps``
    and offset 0. gated: the O results are a gate and a value half, of which `swiglu` makes N = O / 2; else N = O.
    residual_TN [T, N]: added last. scales_GO, zeros_GO, form, group: as for `linear`. a_LRI,
    b_LrO, adapter_ids_T, widths: if given, the product with the weight is followed by `add_lora`. Products accumulate
    in float32 (float64 for float64 inputs). An implementation may keep float32 between the steps; the reference rounds
    to x's dtype after each.
    """
    if norm_I is not None:
        x_TI = rms_norm.reference(x_TI, norm_I, eps)
    out_TN = linear.reference(x_TI, weight_OI, bias_O, scales_GO, zeros_GO, form, group)
    out_TN = adapted(out_TN, x_TI, a_LRI, b_LrO, adapter_ids_T, widths)
    if gated:
        out_TN = swiglu.reference(out_TN)
    return out_TN if residual_TN is None else residual_TN + out_TN


@fused_linear.fake(traceable=True)
def _(x_TI: Tensor, weight_OI: Tensor, gated: bool) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0] // (2 if gated else 1))
