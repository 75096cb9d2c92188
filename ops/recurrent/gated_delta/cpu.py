"""gated_delta on the CPU: a block of a head's rows of the state stays in the first-level cache for all of a sequence's
tokens, which are computed four at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite, by_site, each_alone
from graphllm.ops.recurrent.gated_delta.op import gated_delta
from graphllm.ops.recurrent.slots import Slots, exporting

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor(b!) out, Tensor"
    " query_start_loc, Tensor slots, Tensor state_versions, Tensor? exports, SymInt S, SymInt G, SymInt H, SymInt K,"
    " SymInt V, SymInt q_token, SymInt q_head, SymInt k_token, SymInt k_head, SymInt v_token, SymInt v_head, SymInt"
    " g_token, SymInt g_head, SymInt beta_token, SymInt beta_head, SymInt versions, SymInt slot_stride, SymInt"
    " version_stride, bool channels, bool wide_g, bool wide_beta, float scale, float norm_eps, bool invariant) -> ()"
)
_MOST_KEYS = 256  # as in cpu.cpp
_kernels = float_kernels("graphllm_gated_delta", _SCHEMA, Path(__file__).with_name("cpu.cpp"))


def _supports(site: CallSite) -> bool:
    v, g, beta, state = (site.args[name] for name in ("v_THV", "g", "beta_TH", "state"))
    rows = [site.args[name] for name in ("q_TGK", "k_TGK")] + [v]
    V, K = state.shape[3:]
    return (
        v.dtype in _kernels
        and state.dtype == torch.float32
        and all(t.dtype == v.dtype and t.stride(2) == 1 for t in rows)
        and all(t.dtype in (v.dtype, torch.float32) for t in (g, beta))
        and (g.dim() == 2 or g.stride(2) == 1)
        and state.stride()[2:] == (V * K, K, 1)
        and K <= _MOST_KEYS
    )


def _remedy(site: CallSite) -> str:
    dtype, K = str(site.args["v_THV"].dtype).removeprefix("torch."), site.args["state"].shape[4]
    if K > _MOST_KEYS:
        return f"keys of {K} numbers: the delta rule for a CPU takes at most {_MOST_KEYS}"
    return f"dtype {dtype}: no delta rule for a CPU takes it; use bfloat16 or float32"


@gated_delta.impl("cpu", device="cpu", supports=_supports, configs=by_site, row_order=each_alone, remedy=_remedy)
@exporting
def cpu_gated_delta(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state: Tensor, at: Slots, scale: float,
    norm_eps: float, exports: Tensor | None = None, *, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """float32; threads share sequences, heads and blocks of 32 rows of the state."""
    out_THV = v_THV.new_empty(v_THV.shape)
    H, V, K = state.shape[2:]
    _kernels[v_THV.dtype](
        *(q_TGK, k_TGK, v_THV, g, beta_TH, state, out_THV, *at, exports),
        *(at.slots.shape[0], q_TGK.shape[1], H, K, V),
        *(stride for t in (q_TGK, k_TGK, v_THV, g, beta_TH) for stride in t.stride()[:2]),
        *(state.shape[1], state.stride(0), state.stride(1)),
        *(g.dim() == 3, g.dtype == torch.float32, beta_TH.dtype == torch.float32, scale, norm_eps, invariant),
    )
    return out_THV
