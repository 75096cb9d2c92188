"""causal_conv on the CPU: every input is read once, and the last ones of a channel stay in registers."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.recurrent.causal_conv.op import causal_conv
from graphllm.ops.recurrent.slots import Slots, exporting

_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor(b!) out, Tensor query_start_loc, Tensor slots,"
    " Tensor state_versions, Tensor? exports, SymInt S, SymInt D, SymInt W, SymInt x_stride, SymInt weight_stride,"
    " SymInt versions, SymInt slot_stride, SymInt version_stride, bool silu) -> ()"
)
_kernels = float_kernels("graphllm_causal_conv", _SCHEMA, Path(__file__).with_name("cpu.cpp"))


def _supports(site: CallSite) -> bool:
    x_TD, weight_DW, state, bias_D = (site.args[name] for name in ("x_TD", "weight_DW", "state", "bias_D"))
    return (
        x_TD.dtype in _kernels
        and all(t.dtype == x_TD.dtype for t in (weight_DW, state))
        and (bias_D is None or bias_D.dtype == x_TD.dtype)
        and x_TD.stride(1) == weight_DW.stride(1) == state.stride(3) == 1
        and state.stride(2) == state.shape[3]
    )


@causal_conv.impl("cpu", device="cpu", supports=_supports, row_order=each_alone)
@exporting
def cpu_causal_conv(
    x_TD: Tensor,
    weight_DW: Tensor,
    state: Tensor,
    at: Slots,
    bias_D: Tensor | None,
    activation: str,
    exports: Tensor | None,
) -> Tensor:
    """float32 sums; threads share sequences and channels."""
    out_TD = x_TD.new_empty(x_TD.shape)
    D, W = weight_DW.shape
    _kernels[x_TD.dtype](
        *(x_TD, weight_DW, bias_D, state, out_TD, *at, exports),
        *(at.slots.shape[0], D, W, x_TD.stride(0), weight_DW.stride(0)),
        *(state.shape[1], state.stride(0), state.stride(1), activation == "silu"),
    )
    return out_TD
