"""index_topk: the earlier tokens that sparse attention looks at, found with small keys in a cache of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, StateSpec, nbytes, op
from graphllm.ops.attention.index_topk.operands import IndexRows, PagedKeys


def _cost(rows: IndexRows, paged: PagedKeys, topk: int) -> Cost:
    (T, H, E), (cache, _, query_start_loc, seq_lens) = rows.index_q_THE.shape, paged
    queries = (query_start_loc[1:] - query_start_loc[:-1]).tolist()
    pairs = read = 0
    for n, length in zip(queries, seq_lens.tolist(), strict=True):
        if n > 0:
            pairs += sum(range(length - n + 1, length + 1))
            read += length + n
    return Cost(nbytes(*rows) + read * E * cache.element_size() + 4 * T * topk, 2 * H * (E + 1) * pairs)


def index_state(E: int) -> StateSpec:
    """The cache of one layer: of each token a key of E numbers."""
    return StateSpec("index", "block", ("P", E))


@op(boundary=True, mutates=("index_cache",), cost=_cost)
def index_topk(rows: IndexRows, paged: PagedKeys, topk: int) -> Tensor:
    """Of each token the positions of the topk tokens with the best scores among those up to itself, one ragged batch.

    Row i of a sequence's n rows has position seq_lens - n + i. The score of a position is the sum over heads of
    weight * max(q.k, 0), in float32. Of equal scores the lower position is the better one.
    The keys of the step's tokens are first written to the cache. What no row sees of the cache may be NaN.
    Returns [T, topk] int32: positions in ascending order, then -1 where there are fewer than topk. Rows at or after
    query_start_loc[S] are padding and come back unspecified.
    Source: DeepSeek-AI 2025, DeepSeek-V3.2, section 2 (lightning indexer).
    """
    (q_THE, k_TE, weights_TH), (cache, block_table, query_start_loc, seq_lens) = rows, paged
    P, device = cache.shape[1], q_THE.device
    chosen_TK = torch.full((q_THE.shape[0], topk), -1, dtype=torch.int32, device=device)
    starts, exact = query_start_loc.tolist(), torch.promote_types(q_THE.dtype, torch.float32)
    for s, length in enumerate(seq_lens.tolist()):
        a, b = starts[s], starts[s + 1]
        if a == b:
            continue
        own = torch.arange(length - (b - a), length, device=device)
        cache[block_table[s, own // P].long(), own % P] = k_TE[a:b].to(cache.dtype)
        keys = cache[block_table[s, : -(-length // P)].long()].flatten(0, 1)[:length].to(exact)
        products = torch.einsum("the,ne->thn", q_THE[a:b].to(exact), keys).relu()
        scores = torch.einsum("th,thn->tn", weights_TH[a:b].to(exact), products)
        later = torch.arange(length, device=device) > own[:, None]
        best = torch.sort(scores.masked_fill(later, float("-inf")), dim=1, descending=True, stable=True).indices
        best = best[:, :topk].masked_fill(torch.arange(min(topk, length), device=device) > own[:, None], length)
        best = best.sort(1).values
        chosen_TK[a:b, : best.shape[1]] = best.masked_fill(best == length, -1).to(torch.int32)
    return chosen_TK


@index_topk.fake
def _(index_q_THE: Tensor, index_k_TE: Tensor, index_weights_TH: Tensor, index_cache: Tensor, topk: int) -> Tensor:
    T, H, E = index_q_THE.shape
    torch._check(index_k_TE.shape[1] == E, lambda: f"index keys of {index_k_TE.shape[1]}, queries of {E}")
    torch._check(index_cache.shape[2] == E, lambda: f"a cache of {index_cache.shape[2]}, keys of {E}")
    torch._check(index_weights_TH.shape[1] == H, lambda: f"weights for {index_weights_TH.shape[1]} heads, not {H}")
    return index_q_THE.new_empty((T, topk), dtype=torch.int32)
