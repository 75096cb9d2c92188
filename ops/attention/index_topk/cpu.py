"""index_topk on the CPU, in bfloat16 or float32. Products and sums are float32."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.attention.index_topk.op import index_topk
from graphllm.ops.attention.index_topk.operands import IndexRows, PagedKeys

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor weights, Tensor(a!) index_cache, Tensor block_table, Tensor query_start_loc,"
    " Tensor seq_lens, Tensor(b!) chosen, SymInt T, SymInt S, SymInt H, SymInt E, SymInt P, SymInt topk,"
    " SymInt q_token, SymInt q_head, SymInt k_token, SymInt weights_token, SymInt cache_block, SymInt cache_slot,"
    " SymInt table_stride) -> ()"
)
_SOURCE = Path(__file__).with_name("cpu.cpp")
_kernels = {
    torch.float32: CKernel("graphllm_index_topk_f32", _SCHEMA, _SOURCE),
    torch.bfloat16: CKernel("graphllm_index_topk_bf16", _SCHEMA, _SOURCE),
}


def _supports(site: CallSite) -> bool:
    (q, k, weights), (cache, *tables) = site.struct(IndexRows), site.struct(PagedKeys)
    return (
        q.dtype in _kernels
        and k.dtype == cache.dtype == q.dtype
        and weights.dtype == torch.float32
        and all(t.dtype == torch.int32 for t in tables)
        and all(t.stride(-1) == 1 for t in (q, k, weights, cache, *tables))
    )


def _remedy(site: CallSite) -> str:
    dtype = str(site.args["index_k_TE"].dtype).removeprefix("torch.")
    return f"dtype {dtype}: no index_topk for a CPU takes it; use bfloat16 or float32"


@index_topk.impl("cpu", device="cpu", supports=_supports, row_order=each_alone, remedy=_remedy)
def cpu_index_topk(rows: IndexRows, paged: PagedKeys, topk: int) -> Tensor:
    """Scores of segments of keys, and then the selection of each row, are divided among threads."""
    (q, k, weights), (cache, table, *_) = rows, paged
    T, H, E = q.shape
    chosen_TK = q.new_empty((T, topk), dtype=torch.int32)
    _kernels[q.dtype](
        *(*rows, *paged, chosen_TK, T, paged.seq_lens.shape[0], H, E, cache.shape[1], topk, *q.stride()[:2]),
        *(k.stride(0), weights.stride(0), *cache.stride()[:2], table.stride(0)),
    )
    return chosen_TK
