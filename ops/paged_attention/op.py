"""paged_attention: write this step's keys and values into the paged cache, then attend, for one ragged batch."""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor

from graphllm.ir import Cost, StateSpec, nbytes, op


def _cost(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, kv_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    window: int,
) -> Cost:  # fmt: skip
    H, E = q_THE.shape[1:]
    K = k_TKE.shape[1]
    queries = (query_start_loc[1:] - query_start_loc[:-1]).tolist()
    pairs = read = 0
    for n, length in zip(queries, seq_lens.tolist(), strict=True):
        if n == 0:
            continue
        spans = [min(p + 1, window) if window else p + 1 for p in range(length - n, length)]
        pairs += sum(spans)
        read += min(length, window + n - 1) if window else length
    cache = 2 * read * K * E * kv_cache.element_size()
    return Cost(2 * nbytes(q_THE) + 2 * nbytes(k_TKE, v_TKE) + cache, 4 * H * E * pairs)


def kv_state(K: int, E: int, window: int = 0) -> StateSpec:
    """The cache of one layer: keys and values of K heads of E numbers, of all tokens or of the last ``window``."""
    return StateSpec("kv", "block", (2, K, "P", E), retention="window" if window else "full", window=window)


@op(boundary=True, mutates=("kv_cache",), cost=_cost)
def paged_attention(
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
    """Causal attention of T new tokens over a paged KV cache, grouped-query heads, one ragged batch.

    q_THE [T, H, E], k_TKE and v_TKE [T, K, E]: the step's tokens, sequence after sequence; H is a multiple of K; rows
    may be strided, the last dimension is contiguous. kv_cache [B, 2, K, P, E]: B blocks of P tokens, keys at index 0,
    values at 1; written in place. block_table [S, N] int32: the blocks of each sequence. query_start_loc [S+1] int32:
    sequence s owns rows query_start_loc[s]:query_start_loc[s+1], possibly none. seq_lens [S] int32: its tokens
    including these rows, so row i of its n rows has position seq_lens - n + i. What no row sees of the cache may be
    NaN. scale: factor on q.k. window: if positive, a token sees itself and the window - 1 tokens before it. softcap: if
    positive, scores become softcap * tanh(score / softcap) before the mask. sinks_H [H], in q's dtype: one more score
    of each head, neither scaled nor capped nor masked, which takes its part of the softmax and has no value.
    Returns [T, H, E] in q's dtype; rows at or after query_start_loc[S] are padding and come back unspecified.
    Softmax and products accumulate in float32. Source: Vaswani et al. 2017; Kwon et al. 2023 (paging); Ainslie et al.
    2023 (grouped queries); Gemma 2 report 2024 (soft cap); OpenAI 2025, gpt-oss (sinks).
    """
    H = q_THE.shape[1]
    K, P = kv_cache.shape[2], kv_cache.shape[3]
    out_THE = torch.zeros_like(q_THE, memory_format=torch.contiguous_format)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    accumulate = torch.float64 if q_THE.dtype == torch.float64 else torch.float32
    for s, length in enumerate(lengths):
        a, b = starts[s], starts[s + 1]
        if a == b:
            continue
        positions = torch.arange(length - (b - a), length, device=q_THE.device)
        block = block_table[s, positions // P].long()
        kv_cache[block, 0, :, positions % P] = k_TKE[a:b]
        kv_cache[block, 1, :, positions % P] = v_TKE[a:b]
        blocks = block_table[s, : -(-length // P)].long()
        keys, values = (
            repeat(kv_cache[blocks, i].to(accumulate), "b k p e -> (b p) (k g) e", g=H // K)[:length] for i in (0, 1)
        )
        scores = torch.einsum("the,lhe->htl", q_THE[a:b].to(accumulate), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length, device=q_THE.device)
        visible = at[None, :] <= positions[:, None]
        if window > 0:
            visible &= at[None, :] > positions[:, None] - window
        values = values.masked_fill(~visible.any(0)[:, None, None], 0)  # 0 * NaN is NaN
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H.to(accumulate)[:, None, None].expand(-1, b - a, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        out_THE[a:b] = torch.einsum("htl,lhe->the", weights, values).to(q_THE.dtype)
    return out_THE


@paged_attention.fake
def _(q_THE: Tensor) -> Tensor:
    return torch.empty_like(q_THE, memory_format=torch.contiguous_format)
