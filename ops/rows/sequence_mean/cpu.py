"""sequence_mean on the CPU, bfloat16 or float32."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite
from graphllm.ops.rows.sequence_mean.op import sequence_mean

_SCHEMA = (
    "(Tensor x, Tensor query_start_loc, Tensor rows, Tensor(a!) out, SymInt S, SymInt R, SymInt D, SymInt stride) -> ()"
)
_SOURCE = Path(__file__).with_name("cpu.cpp")
_kernels = float_kernels("graphllm_sequence_mean", _SCHEMA, _SOURCE, usual=False)


def _supports(site: CallSite) -> bool:
    x, *places = [site.args[name] for name in ("x_TD", "query_start_loc", "rows_R")]
    return (
        x.dtype in _kernels and x.stride(-1) == 1 and all(p.dtype == torch.int32 and p.stride(0) == 1 for p in places)
    )


def _remedy(site: CallSite) -> str:
    dtype = str(site.args["x_TD"].dtype).removeprefix("torch.")
    return f"dtype {dtype}: no mean of rows for a CPU takes it; use bfloat16 or float32"


@sequence_mean.impl("cpu", device="cpu", supports=_supports, remedy=_remedy)
def cpu_sequence_mean(x_TD: Tensor, query_start_loc: Tensor, rows_R: Tensor) -> Tensor:
    """Sums of stretches of columns, shared among threads."""
    R, D = rows_R.shape[0], x_TD.shape[1]
    out_RD = x_TD.new_empty((R, D), dtype=torch.float32)
    _kernels[x_TD.dtype](
        x_TD, query_start_loc, rows_R, out_RD, query_start_loc.shape[0] - 1, R, D, x_TD.stride(0)
    )  # fmt: skip
    return out_RD
