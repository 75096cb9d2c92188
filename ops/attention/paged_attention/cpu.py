"""paged_attention on the CPU: one kernel for decode and ragged prefill, bfloat16 or float32, with a cache of the same
or of 8 bits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.op import CallSite, by_site, each_alone
from graphllm.ops.attention.cpu_kernels import kernels_of
from graphllm.ops.attention.paged_attention.op import paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rows, Scores

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens,"
    " Tensor(b!) out, SymInt T, SymInt S, SymInt H, SymInt K, SymInt E, SymInt P, SymInt q_token, SymInt q_head,"
    " SymInt k_token, SymInt k_head, SymInt v_token, SymInt v_head, SymInt cache_block, SymInt cache_kind,"
    " SymInt cache_head, SymInt cache_slot, SymInt table_stride, float scale, SymInt window, float softcap,"
    " Tensor? sinks, Tensor? kv_scales, Tensor? ancestors, bool invariant) -> ()"
)
_kernels = kernels_of("paged_attention", _SCHEMA, Path(__file__).parent)


def _supports(site: CallSite) -> bool:
    q, *others = [site.args[name] for name in ("q_THE", "k_TKE", "v_TKE", "sinks_H") if site.args[name] is not None]
    tables = [site.args[name] for name in ("block_table", "query_start_loc", "seq_lens")]
    return (
        (q.dtype, site.args["kv_cache"].dtype) in _kernels
        and site.args["cos_TF"] is None
        and all(t.dtype == q.dtype for t in others)
        and all(t.dtype == torch.int32 for t in tables)
        and all(t.stride(-1) == 1 for t in (q, *others, *tables, site.args["kv_cache"]))
    )


def _remedy(site: CallSite) -> str:
    dtype = str(site.args["q_THE"].dtype).removeprefix("torch.")
    return f"dtype {dtype}: no attention kernel for a CPU takes it; use bfloat16 or float32"


@paged_attention.impl("cpu", device="cpu", supports=_supports, configs=by_site, row_order=each_alone, remedy=_remedy)
def cpu_paged_attention(
    rows: Rows,
    paged: Paged,
    scores: Scores,
    kv_scales: Tensor | None = None,
    ancestors_T: Tensor | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """Online softmax over chunks of the cache; bfloat16 takes AMX or AVX-512 products, with weights, and numbers of a
    cache in int8, rounded to it."""
    (q_THE, k_TKE, v_TKE), (kv_cache, block_table, query_start_loc, seq_lens) = rows, paged
    scale, window, softcap, sinks_H = scores
    out_THE = q_THE.new_empty(q_THE.shape)
    T, H, E = q_THE.shape
    _kernels[q_THE.dtype, kv_cache.dtype](
        *(q_THE, k_TKE, v_TKE, kv_cache, block_table, query_start_loc, seq_lens, out_THE),
        *(T, seq_lens.shape[0], H, k_TKE.shape[1], E, kv_cache.shape[3]),
        *(stride for t in (q_THE, k_TKE, v_TKE) for stride in t.stride()[:2]),
        *(*kv_cache.stride()[:3], E if kv_cache.dtype == torch.int8 else kv_cache.stride(3)),
        *(block_table.stride(0), scale, window, softcap, sinks_H, kv_scales, ancestors_T, invariant),
    )
    return out_THE
