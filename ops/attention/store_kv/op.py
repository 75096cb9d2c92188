"""store_kv: keys and values of a step's tokens go to the cache, for rows of a later run to see."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.attention.paged_attention.op import store
from graphllm.ops.attention.paged_attention.operands import Paged


def _cost(k_TKE: Tensor, v_TKE: Tensor, kv_cache: Tensor) -> Cost:
    tokens, (K, E) = k_TKE.shape[0], (kv_cache.shape[2], kv_cache.shape[4])
    return Cost(nbytes(k_TKE, v_TKE) + 2 * tokens * K * E * kv_cache.element_size(), 0)


@op(boundary=True, cost=_cost, mutates=("kv_cache",))
def store_kv(k_TKE: Tensor, v_TKE: Tensor, paged: Paged, kv_scales: Tensor | None = None) -> None:
    """What `paged_attention` does to the cache, and nothing else: the same arguments, of every dtype that it takes.

    Rows at or after query_start_loc[S] are padding and are not stored.
    """
    kv_cache, block_table, query_start_loc, seq_lens = paged
    P = kv_cache.shape[3]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    scales = (None, None) if kv_scales is None else kv_scales.unbind()
    for s, length in enumerate(lengths):
        a, b = starts[s], starts[s + 1]
        positions = torch.arange(length - (b - a), length, device=k_TKE.device)
        block = block_table[s, positions // P].long()
        for kind, rows in enumerate((k_TKE, v_TKE)):
            store(kv_cache, kind, block, positions % P, rows[a:b], scales[kind])


@store_kv.fake
def _() -> None:
    return None
