"""store_kv on the CPU: what paged_attention's kernels do before they attend."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.attention.paged_attention.operands import Paged
from graphllm.ops.attention.store_kv.op import store_kv

_SCHEMA = (
    "(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, SymInt S,"
    " SymInt K, SymInt E, SymInt P, SymInt k_token, SymInt k_head, SymInt v_token, SymInt v_head, SymInt cache_block,"
    " SymInt cache_kind, SymInt cache_head, SymInt cache_slot, SymInt table_stride, Tensor? kv_scales) -> ()"
)
_SOURCE = Path(__file__).with_name("cpu.cpp")
_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
_kernels = {
    (dtype, cache): CKernel(f"graphllm_store_kv_{_SHORT[dtype]}_{_SHORT[cache]}", _SCHEMA, _SOURCE, usual=False)
    for dtype in (torch.float32, torch.bfloat16)
    for cache in (dtype, torch.float8_e4m3fn, torch.int8)
}


def _supports(site: CallSite) -> bool:
    k, v, cache, *tables = [t for name, t in site.args.items() if name != "kv_scales"]
    return (
        (k.dtype, cache.dtype) in _kernels
        and v.dtype == k.dtype
        and all(t.dtype == torch.int32 for t in tables)
        and all(t.stride(-1) == 1 for t in (k, v, cache, *tables))
    )


@store_kv.impl("cpu", device="cpu", supports=_supports, row_order=each_alone)
def cpu_store_kv(k_TKE: Tensor, v_TKE: Tensor, paged: Paged, kv_scales: Tensor | None = None) -> None:
    """Tokens are divided among threads."""
    (K, E), kv_cache = k_TKE.shape[1:], paged.kv_cache
    _kernels[k_TKE.dtype, kv_cache.dtype](
        *(k_TKE, v_TKE, *paged),
        *(paged.seq_lens.shape[0], K, E, kv_cache.shape[3]),
        *(stride for t in (k_TKE, v_TKE) for stride in t.stride()[:2]),
        *(*kv_cache.stride()[:3], E if kv_cache.dtype == torch.int8 else kv_cache.stride(3)),
        *(paged.block_table.stride(0), kv_scales),
    )
