"""paged_attention on the CPU: one kernel for decode and ragged prefill, bfloat16 or float32."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite
from graphllm.ops.paged_attention.op import paged_attention

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens,"
    " Tensor(b!) out, SymInt T, SymInt S, SymInt H, SymInt K, SymInt E, SymInt P, SymInt q_token, SymInt q_head,"
    " SymInt k_token, SymInt k_head, SymInt v_token, SymInt v_head, SymInt cache_block, SymInt cache_kind,"
    " SymInt cache_head, SymInt cache_slot, SymInt table_stride, float scale, SymInt window, float softcap,"
    " Tensor? sinks) -> ()"
)
_SOURCE = Path(__file__).with_name("cpu.cpp")
_kernels = {
    torch.float32: CKernel("graphllm_paged_attention_f32", _SCHEMA, _SOURCE),
    torch.bfloat16: CKernel("graphllm_paged_attention_bf16", _SCHEMA, _SOURCE),
}


def _supports(site: CallSite) -> bool:
    values = [site.args[name] for name in ("q_THE", "k_TKE", "v_TKE", "kv_cache")]
    tables = [site.args[name] for name in ("block_table", "query_start_loc", "seq_lens")]
    sinks = site.args["sinks_H"]
    if sinks is not None and (sinks.dtype != values[0].dtype or not sinks.is_contiguous()):
        return False
    return all(t.dtype == values[0].dtype and t.dtype in _kernels and t.stride(-1) == 1 for t in values) and all(
        t.dtype == torch.int32 and t.stride(-1) == 1 for t in tables
    )


def _remedy(site: CallSite) -> str:
    dtype = str(site.args["q_THE"].dtype).removeprefix("torch.")
    return f"dtype {dtype}: no attention kernel for a CPU takes it; use bfloat16 or float32"


@paged_attention.impl("cpu", device="cpu", supports=_supports, remedy=_remedy)
def cpu_paged_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Online softmax over chunks of the cache; bfloat16 takes AMX or AVX-512 products, with weights rounded to it."""
    out_THE = q_THE.new_empty(q_THE.shape)
    T, H, E = q_THE.shape
    _kernels[q_THE.dtype](
        *(q_THE, k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, out_THE),
        *(T, seq_lens.shape[0], H, k_TKE.shape[1], E, kv_cache.shape[3]),
        *(stride for t in (q_THE, k_TKE, v_TKE) for stride in t.stride()[:2]),
        *kv_cache.stride()[:4],
        *(block_table.stride(0), scale, window, softcap, sinks_H),
    )
    return out_THE
