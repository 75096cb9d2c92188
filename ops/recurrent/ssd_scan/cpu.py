"""ssd_scan on the CPU: a row of a head's state stays in registers over a block of tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.recurrent.slots import Slots, exporting
from graphllm.ops.recurrent.ssd_scan.op import ssd_scan

_SCHEMA = (
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor(a!) state, Tensor(b!)"
    " out, Tensor query_start_loc, Tensor slots, Tensor state_versions, Tensor? exports, SymInt S, SymInt H, SymInt"
    " P, SymInt G, SymInt N, SymInt x_stride, SymInt dt_stride, SymInt B_stride, SymInt C_stride, SymInt versions,"
    " SymInt slot_stride, SymInt version_stride, float dt_min, float dt_max) -> ()"
)
_kernels = float_kernels("graphllm_ssd_scan", _SCHEMA, Path(__file__).with_name("cpu.cpp"))


def plain(site: CallSite) -> bool:
    """Whether the arguments are as kernels read them: rows of one dtype, parameters in float32."""
    x_THP, B_TGN, C_TGN, A_H, state = (site.args[name] for name in ("x_THP", "B_TGN", "C_TGN", "A_H", "state"))
    given = (x_THP, B_TGN, C_TGN, site.args["dt_TH"])
    floats = (A_H, site.args["D_H"], site.args["dt_bias_H"])
    return (
        all(t.dtype == x_THP.dtype and t.stride(-1) == 1 for t in given)
        and all(t.dtype == torch.float32 and t.stride(-1) == 1 for t in floats if t is not None)
        and all(t.stride(1) == t.shape[2] for t in (x_THP, B_TGN, C_TGN))
        and state.stride()[2:] == (state.shape[3] * state.shape[4], state.shape[4], 1)
    )


def _supports(site: CallSite) -> bool:
    return site.args["x_THP"].dtype in _kernels and site.args["state"].dtype == torch.float32 and plain(site)


@ssd_scan.impl("cpu", device="cpu", supports=_supports, row_order=each_alone)
@exporting
def cpu_ssd_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    state: Tensor,
    at: Slots,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    dt_min: float,
    dt_max: float,
    exports: Tensor | None,
) -> Tensor:
    """The recurrence as it is written: on a CPU's vectors chunks would take as many products."""
    out_THP = x_THP.new_empty(x_THP.shape)
    _, H, P = x_THP.shape
    _kernels[x_THP.dtype](
        *(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, state, out_THP, *at, exports),
        *(at.slots.shape[0], H, P, *B_TGN.shape[1:], *(t.stride(0) for t in (x_THP, dt_TH, B_TGN, C_TGN))),
        *(state.shape[1], state.stride(0), state.stride(1), dt_min, dt_max),
    )
    return out_THP
