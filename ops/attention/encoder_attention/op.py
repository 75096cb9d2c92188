"""encoder_attention: every token of a sequence attends to all of it, for one ragged batch, without a cache."""

from __future__ import annotations

import itertools

import torch
from einops import repeat
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, query_start_loc: Tensor, window: int) -> Cost:
    H, E = q_THE.shape[1:]
    pairs = 0
    for n in (query_start_loc[1:] - query_start_loc[:-1]).tolist():
        pairs += n * n if window == 0 else sum(min(i + window + 1, n) - max(i - window, 0) for i in range(n))
    return Cost(2 * nbytes(q_THE) + nbytes(k_TKE, v_TKE), 4 * H * E * pairs)


@op(boundary=True, cost=_cost)
def encoder_attention(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, query_start_loc: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Attention of T tokens that sees both ways, within each sequence of a ragged batch, grouped-query heads.

    q_THE [T, H, E], k_TKE and v_TKE [T, K, E]: the tokens, sequence after sequence; H is a multiple of K; rows may be
    strided, the last dimension is contiguous. query_start_loc [S+1] int32: sequence s owns rows
    query_start_loc[s]:query_start_loc[s+1], possibly none. scale: factor on q.k. window: if positive, a token sees
    itself and ``window`` tokens on each side of it.
    Returns [T, H, E] in q's dtype; rows at or after query_start_loc[S] are padding and come back unspecified.
    Softmax and products accumulate in float32. Source: Vaswani et al. 2017; Devlin et al. 2018 (both ways); Warner et
    al. 2024, ModernBERT (windows).
    """
    H, K = q_THE.shape[1], k_TKE.shape[1]
    out_THE = torch.zeros_like(q_THE, memory_format=torch.contiguous_format)
    accumulate = torch.float64 if q_THE.dtype == torch.float64 else torch.float32
    starts = query_start_loc.tolist()
    for a, b in itertools.pairwise(starts):
        if a == b:
            continue
        keys, values = (repeat(x[a:b].to(accumulate), "t k e -> t (k g) e", g=H // K) for x in (k_TKE, v_TKE))
        scores_HTL = torch.einsum("the,lhe->htl", q_THE[a:b].to(accumulate), keys) * scale
        if window > 0:
            at = torch.arange(b - a, device=q_THE.device)
            scores_HTL = scores_HTL.masked_fill((at[:, None] - at[None, :]).abs() > window, float("-inf"))
        out_THE[a:b] = torch.einsum("htl,lhe->the", torch.softmax(scores_HTL, dim=-1), values).to(q_THE.dtype)
    return out_THE


@encoder_attention.fake
def _(q_THE: Tensor) -> Tensor:
    return torch.empty_like(q_THE, memory_format=torch.contiguous_format)
