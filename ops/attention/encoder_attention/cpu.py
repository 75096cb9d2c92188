"""encoder_attention on the CPU: paged_attention's tiles over keys and values as they lie in the step's rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite
from graphllm.ops.attention.encoder_attention.op import encoder_attention

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor(a!) out, SymInt T, SymInt S, SymInt H, SymInt K,"
    " SymInt E, SymInt q_token, SymInt q_head, SymInt k_token, SymInt k_head, SymInt v_token, SymInt v_head,"
    " float scale, SymInt window) -> ()"
)
_kernels = float_kernels("graphllm_encoder_attention", _SCHEMA, Path(__file__).with_name("cpu.cpp"), usual=False)


def _supports(site: CallSite) -> bool:
    q, k, v, starts = [site.args[name] for name in ("q_THE", "k_TKE", "v_TKE", "query_start_loc")]
    return (
        q.dtype in _kernels
        and k.dtype == v.dtype == q.dtype
        and starts.dtype == torch.int32
        and all(t.stride(-1) == 1 for t in (q, k, v, starts))
    )


def _remedy(site: CallSite) -> str:
    dtype = str(site.args["q_THE"].dtype).removeprefix("torch.")
    return f"dtype {dtype}: no attention kernel for a CPU takes it; use bfloat16 or float32"


@encoder_attention.impl("cpu", device="cpu", supports=_supports, remedy=_remedy)
def cpu_encoder_attention(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, query_start_loc: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Online softmax over chunks of a sequence; bfloat16 takes AMX or AVX-512 products, with weights rounded to it."""
    out_THE = q_THE.new_empty(q_THE.shape)
    T, H, E = q_THE.shape
    _kernels[q_THE.dtype](
        *(q_THE, k_TKE, v_TKE, query_start_loc, out_THE),
        *(T, query_start_loc.shape[0] - 1, H, k_TKE.shape[1], E),
        *(stride for t in (q_THE, k_TKE, v_TKE) for stride in t.stride()[:2]),
        *(scale, window),
    )
    return out_THE
