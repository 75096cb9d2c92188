"""selective_scan on the CPU: lanes are channels, whose states stay in registers or the first cache for all tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.recurrent.selective_scan.op import selective_scan
from graphllm.ops.recurrent.slots import Slots, exporting

_SCHEMA = (
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) state, Tensor query_start_loc, Tensor slots,"
    " Tensor state_versions, Tensor? exports, Tensor? D, Tensor? dt_bias, Tensor(b!) out, SymInt sequences, SymInt"
    " channels, SymInt N, SymInt x_stride, SymInt dt_stride, SymInt A_stride, SymInt B_stride, SymInt C_stride,"
    " SymInt versions, SymInt slot_stride, SymInt version_stride) -> ()"
)
_kernels = float_kernels("graphllm_selective_scan", _SCHEMA, Path(__file__).with_name("cpu.cpp"), usual=False)
MOST_N = 256  # numbers of a channel's state that the kernel has room for
FLOATS = ("A_DN", "D_D", "dt_bias_D")
TABLES = ("query_start_loc", "slots", "state_versions")


def plain(site: CallSite) -> bool:
    """Whether the arguments are as kernels read them: rows of one dtype, parameters in float32."""
    rows = [site.args[name] for name in ("x_TD", "dt_TD", "B_TN", "C_TN")]
    floats = [site.args[name] for name in FLOATS if site.args[name] is not None]
    tables = [site.args[name] for name in TABLES]
    state = site.args["state"]
    return (
        all(t.dtype == rows[0].dtype for t in rows)
        and all(t.dtype == torch.float32 for t in floats)
        and all(t.dtype == torch.int32 for t in tables)
        and all(t.stride(-1) == 1 for t in (*rows, *floats, *tables, state))
        and state.stride(2) == state.shape[3]
    )


def _supports(site: CallSite) -> bool:
    whole = site.args["state"].dtype == torch.float32 and site.args["A_DN"].shape[1] <= MOST_N
    return site.args["x_TD"].dtype in _kernels and whole and plain(site)


def _remedy(site: CallSite) -> str:
    dtype = str(site.args["x_TD"].dtype).removeprefix("torch.")
    return f"dtype {dtype}: no kernel of Mamba's layers for a CPU takes it; use bfloat16 or float32"


@selective_scan.impl("cpu", device="cpu", supports=_supports, row_order=each_alone, remedy=_remedy)
@exporting
def cpu_selective_scan(
    x_TD: Tensor,
    dt_TD: Tensor,
    A_DN: Tensor,
    B_TN: Tensor,
    C_TN: Tensor,
    state: Tensor,
    at: Slots,
    D_D: Tensor | None = None,
    dt_bias_D: Tensor | None = None,
    exports: Tensor | None = None,
) -> Tensor:
    """Parallel over blocks of channels and, within one, over sequences; exp is 2 to a power by a polynomial."""
    out_TD = x_TD.new_empty(x_TD.shape)
    D, N = A_DN.shape
    _kernels[x_TD.dtype](
        *(x_TD, dt_TD, A_DN, B_TN, C_TN, state, *at, exports, D_D, dt_bias_D, out_TD, at.slots.shape[0], D, N),
        *(t.stride(0) for t in (x_TD, dt_TD, A_DN, B_TN, C_TN)),
        *(state.shape[1], state.stride(0), state.stride(1)),
    )
    return out_TD
