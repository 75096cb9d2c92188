"""sparse_latent_attention: attention over a cache of latents that looks at chosen tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.attention.latent_attention import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.op import load, result_of, store


def _cost(rows: LatentRows, up: UpProjections, paged: PagedLatents, chosen_TK: Tensor) -> Cost:
    """In latent space; every sequence's chosen rows are read once for each of its tokens, or all of them once."""
    (T, _, R), (H, N, L), V = rows.q_rope_THR.shape, up.k_up_HNL.shape, up.v_up_HVL.shape[1]
    cache, _, query_start_loc, seq_lens = paged
    starts, pairs, read = query_start_loc.tolist(), 0, 0
    counts = (chosen_TK[: starts[-1]] >= 0).sum(1).tolist()
    for a, b, length in zip(starts, starts[1:], seq_lens.tolist(), strict=False):
        seen = sum(counts[a:b])
        pairs += seen
        read += min(seen, length) + b - a
    moved = read * cache.shape[2] * cache.element_size() + nbytes(*rows, *up) + 4 * pairs
    flops = 2 * H * (T * L * (N + V) + pairs * (2 * L + R))
    return Cost(moved + T * H * V * rows.q_rope_THR.element_size(), flops)


@op(boundary=True, mutates=("latent_cache",), cost=_cost)
def sparse_latent_attention(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, chosen_TK: Tensor, scale: float
) -> Tensor:
    """`latent_attention` in which a token sees the chosen ones of its sequence only.

    Arguments, keys, values and the cache are those of `latent_attention`; all tokens are read as they are in the cache.
    chosen_TK: of each token positions in its sequence, int32 [T, K] or with more rows. They differ, none is later than
    the token's own, and there is at least one. -1 follows after the last one. `index_topk` makes such.
    scale: factor of q.k.
    Returns [T, H, V] in q's dtype; rows at or after query_start_loc[S] are padding and come back unspecified.
    All is computed in float32. An implementation may round queries in latent space, k_up_HNL[h]^T q, and weighted sums
    of latents to q's dtype. Source: DeepSeek-AI 2025, DeepSeek-V3.2, section 2.
    """
    (q_nope_THN, q_rope_THR, latent_TL, k_rope_TR), (k_up_HNL, v_up_HVL) = rows, up
    latent_cache, block_table, query_start_loc, seq_lens = paged
    (T, H, _), L, P = q_nope_THN.shape, latent_TL.shape[1], latent_cache.shape[1]
    out_THV = q_nope_THN.new_zeros(T, H, v_up_HVL.shape[1])
    starts, exact = query_start_loc.tolist(), torch.promote_types(q_nope_THN.dtype, torch.float32)
    q_nope, q_rope, k_up, v_up = (x.to(exact) for x in (q_nope_THN, q_rope_THR, k_up_HNL, v_up_HVL))
    for s, length in enumerate(seq_lens.tolist()):
        a, b = starts[s], starts[s + 1]
        if a == b:
            continue
        own = torch.arange(length - (b - a), length, device=q_nope.device)
        store(latent_cache, block_table[s, own // P].long(), own % P, latent_TL[a:b], k_rope_TR[a:b])
        latents, k_rope = (x[:length] for x in load(latent_cache, block_table[s, : -(-length // P)].long(), L, exact))
        queries = torch.einsum("thn,hnl->thl", q_nope[a:b], k_up)
        logits = torch.einsum("thl,nl->htn", queries, latents) + torch.einsum("thr,nr->htn", q_rope[a:b], k_rope)
        chosen = chosen_TK[a:b].long()
        seen = torch.zeros(b - a, length + 1, dtype=torch.bool, device=chosen.device)
        seen = seen.scatter(1, chosen.masked_fill(chosen < 0, length), True)[:, :length]
        weights = torch.softmax((logits * scale).masked_fill(~seen, float("-inf")), dim=-1)
        means = torch.einsum("htn,nl->thl", weights, latents)
        out_THV[a:b] = torch.einsum("thl,hvl->thv", means, v_up).to(out_THV.dtype)
    return out_THV


sparse_latent_attention.fake(result_of)
