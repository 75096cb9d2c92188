"""token_logprobs: how likely a token was, and which tokens were the likeliest, for rows that ask for it."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, op


def _cost(logits_SV: Tensor, wanted_S: Tensor, k: int) -> Cost:
    rows = int((wanted_S >= 0).sum())
    V = logits_SV.shape[1]
    return Cost(rows * V * logits_SV.element_size() + 4 * len(wanted_S) * (2 + 2 * k), 4 * rows * V)


@op(boundary=True, cost=_cost)
def token_logprobs(logits_SV: Tensor, tokens_S: Tensor, target_S: Tensor, wanted_S: Tensor, k: int) -> Tensor:
    """Log-probabilities of one token and of the k likeliest tokens of each row, under the softmax of its logits.

    logits_SV [S, V], any float dtype, V < 2^24; NaN is treated as -inf, as in `sample`. tokens_S [S] int32: the sampled
    tokens, -1 for none. target_S [S] int32: the token to score instead, for prompts; -1 scores the sampled one.
    wanted_S [S] int32: -1 where the row is not wanted: its columns are 0 and implementations skip its work; all others
    are filled, with all k. Returns [S, 2 + 2 k] float32, contiguous (float64 for float64). Columns: the token's
    log-probability; its rank, 1 plus the number of larger logits; k log-probabilities, largest first, ties to the lower
    id; their k token ids, exact in float32. Beyond V tokens the log-probability is -inf and the id 0; a token of -1 has
    -inf and rank V. Natural logarithms, computed in float32.
    """
    dtype = torch.promote_types(logits_SV.dtype, torch.float32)
    V = logits_SV.shape[1]
    x_SV = logits_SV.to(dtype)
    x_SV = torch.where(x_SV.isnan(), float("-inf"), x_SV)
    total_S1 = torch.logsumexp(x_SV, dim=1, keepdim=True)

    def logprob(x: Tensor) -> Tensor:
        return torch.where(x == float("-inf"), x, x - total_S1)

    token_S1 = torch.where(target_S >= 0, target_S, tokens_S)[:, None].long()
    scored_S1 = x_SV.gather(1, token_S1.clamp(min=0)).masked_fill(token_S1 < 0, float("-inf"))
    rank_S1 = torch.where(token_S1 < 0, V, 1 + (x_SV > scored_S1).sum(dim=1, keepdim=True))
    best = torch.sort(x_SV, dim=1, descending=True, stable=True)
    found, missing = min(k, V), max(k - V, 0)
    values_Sk = torch.nn.functional.pad(logprob(best.values[:, :found]), (0, missing), value=float("-inf"))
    ids_Sk = torch.nn.functional.pad(best.indices[:, :found], (0, missing))
    out = torch.cat([logprob(scored_S1), rank_S1.to(dtype), values_Sk, ids_Sk.to(dtype)], dim=1)
    return out.masked_fill((wanted_S < 0)[:, None], 0.0)


@token_logprobs.fake  # the reference is long, and this is needed for every bucket
def _(logits_SV: Tensor, k: int) -> Tensor:
    dtype = torch.promote_types(logits_SV.dtype, torch.float32)
    return logits_SV.new_empty((logits_SV.shape[0], 2 + 2 * k), dtype=dtype)
