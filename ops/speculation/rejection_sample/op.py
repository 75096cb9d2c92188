"""rejection_sample: one token for each row, the row's draft as often as that changes no distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.sampling.sample.op import filtered, uniform, uniform_bits
from graphllm.ops.speculation.rejection_sample.operands import Proposal, RowSampling


def _cost(logits_RV: Tensor) -> Cost:
    return Cost(3 * nbytes(logits_RV), 20 * logits_RV.numel())


@op(boundary=True, cost=_cost)
def rejection_sample(logits_RV: Tensor, sampling: RowSampling, proposal: Proposal) -> Tensor:
    """As `sample`, but for rows with a draft, the token that is expected to come next: they give it as often as they
    may. All else is as there, and a row without a draft draws the same token.

    p: the row's distribution, after temperature, min-p, top-k and top-p. u in (0, 1): `uniform_bits` of token V, which
    no token of the vocabulary has. x: the draft. Greedy rows give the likeliest token, whatever the draft is, but for
    the last kind:
    - draft_probs_NKV: the distribution q from which x was drawn, at [slots_R, place_R]. Lossless: x where u q(x) <
      p(x), else a draw from max(0, p - q), by the race of `sample` with that in place of p, or from p where all of it
      is 0. x must have been drawn by other random numbers than the row's own (`draft_seed`). Then x is given with
      probability 1 minus the distance of p and q (total variation).
    - typical_threshold, typical_alpha above 0: lossy, typical acceptance: x where p(x) is at least the smaller one of
      the threshold and alpha exp(-entropy of p), else a draw from p, as if there were no draft.
    - synthetic_rate above 0: for benchmarks, x where u is below it, else a draw from p: no distribution at all. Greedy
      rows, too.
    - none of these: drafts that nobody drew are accepted with probability p(x) if the draw from p is x: as `sample`.
    Returns [R] int32, -1 for rows without a token that may be chosen. Source: Leviathan et al. 2023, Chen et al. 2023
    (speculative sampling); Cai et al. 2024 (Medusa: typical acceptance).
    """
    temperature_R, *_, seed_R, sample_index_R = sampling
    drafts_R, slots_R, place_R, draft_probs_NKV, typical_threshold, typical_alpha, synthetic_rate = proposal
    logits, kept = filtered(logits_RV, *sampling[:4])
    V = logits.shape[1]
    greedy = torch.argmax(logits, dim=-1)
    possible = logits.max(dim=-1).values > float("-inf")
    u = uniform(uniform_bits(seed_R, sample_index_R, V + 1))
    coin_R = u[:, V]
    exponential = -torch.log1p(-u[:, :V])
    drawn = torch.argmax(kept - torch.log(exponential), dim=-1)
    x_R = drafts_R.clamp(min=0).long()
    drafted, random = drafts_R >= 0, temperature_R > 0
    probs = torch.softmax(kept.masked_fill(~possible[:, None], 0.0), dim=-1)
    p_R = probs.gather(1, x_R[:, None])[:, 0]
    if draft_probs_NKV is not None:
        q = draft_probs_NKV[slots_R.long(), place_R.clamp(0, draft_probs_NKV.shape[1] - 1).long()].float()
        accepted = drafted & random & (coin_R * q.gather(1, x_R[:, None])[:, 0] < p_R)
        residual = (probs - q).clamp(min=0.0)
        residual = torch.where(drafted[:, None] & (residual.amax(dim=-1, keepdim=True) > 0), residual, probs)
        recovered = torch.argmax(torch.log(residual) - torch.log(exponential), dim=-1)
        drawn = torch.where(drafted, recovered, drawn)
    elif typical_threshold > 0:
        entropy_R = -(probs * torch.where(probs > 0, torch.log(probs), 0.0)).sum(dim=-1)
        least_R = torch.clamp(typical_alpha * torch.exp(-entropy_R), max=typical_threshold)
        accepted = drafted & random & (p_R > 0) & (p_R >= least_R)
    else:
        accepted = drafted & (coin_R < synthetic_rate)
    token = torch.where(accepted, x_R, torch.where(random, drawn, greedy))
    return torch.where(possible, token, -1).to(torch.int32)


@rejection_sample.fake(traceable=True)
def _(logits_RV: Tensor) -> Tensor:
    return logits_RV.new_empty(logits_RV.shape[0], dtype=torch.int32)


def draft_seed(seed: Tensor) -> Tensor:
    """The seed [S] int64 by which a draft model samples for a request with that seed: its random numbers have nothing
    to do with those that accept or replace the drafts."""
    return seed ^ 0x5851F42D4C957F2D
