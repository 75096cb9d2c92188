"""moe_route: which experts compute a token, and how much each counts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


class Routing(NamedTuple):
    """How experts are chosen.

    k: experts of a token.
    scoring: "softmax", "sigmoid" or "sparsemixer".
    renormalize: whether weights are divided by their sum.
    scale: factor of the weights.
    groups: of neighbouring experts, 1 for none.
    kept_groups: groups that experts are chosen from.
    bias_N: added to the scores for the choice only, [N] float32.
    jitter: of "sparsemixer".
    shared: experts after the others that all tokens go to, with weight 1.
    share_T1: logits of how much one more of that kind counts, the last one, [T, 1].
    """

    k: int
    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    bias_N: Tensor | None = None
    jitter: float = 0.0
    shared: int = 0
    share_T1: Tensor | None = None

    @property
    def width(self) -> int:
        """Experts of a token, the shared ones too."""
        return self.k + self.shared + (self.share_T1 is not None)


def _cost(logits_TN: Tensor, bias_N: Tensor | None, routing: Routing) -> Cost:
    out = 8 * logits_TN.shape[0] * routing.width
    return Cost(nbytes(logits_TN, bias_N) + out, 8 * logits_TN.numel())


@op(cost=_cost, rowwise=True)
def moe_route(logits_TN: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The k experts of each token: their weights [T, k] float32 and their numbers [T, k] int32, the best first.

    logits_TN [T, N], the router's, any float dtype; all is computed in float32 (float64 for float64). Scores are
    ``scoring`` of the logits: "softmax" over the N experts, or "sigmoid" of each. Experts are chosen by score plus
    bias_N [N] float32, a correction that no weight contains; of equal ones the lower number. With groups > 1 the
    experts are that many groups of neighbours, and only those in the kept_groups best groups may be chosen: a group
    counts as its best expert, or with bias_N as its two best together. The weights are the scores of the chosen,
    divided by their sum if ``renormalize`` (softmax over the chosen is the same), times ``scale``.

    "sparsemixer" chooses one expert after the other; the weight of each is its softmax among the experts not yet chosen
    with logits at most 2 * jitter times max(|logit|, best logit) below the best. It knows no bias, groups or
    renormalize.

    ``shared`` experts, from number N, follow for each token; then, with share_T1, one whose weight is the sigmoid of
    its logit.

    Sources: Jiang et al. 2024 (softmax), DeepSeek-AI 2024, V2 (groups) and V3 (sigmoid, correction), Liu et al. 2023
    (sparsemixer).
    """
    k, scoring, renormalize, scale, groups, kept_groups, bias_N, jitter, shared, share_T1 = routing
    logits = logits_TN.to(torch.promote_types(logits_TN.dtype, torch.float32))
    if routing.width > k:
        weights, chosen = moe_route.reference(logits_TN, routing._replace(shared=0, share_T1=None))
        T, N = logits_TN.shape
        more = torch.arange(N, N + routing.width - k, dtype=chosen.dtype, device=chosen.device).expand(T, -1)
        shares = [] if share_T1 is None else [torch.sigmoid(share_T1.to(weights.dtype))]
        return torch.cat([weights, weights.new_ones(T, shared), *shares], 1), torch.cat([chosen, more], 1)
    if scoring == "sparsemixer":
        return _sparsemixer(logits, k, jitter, scale)
    scores = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    # A sum of scores may be equal where logits are not.
    ranked = logits if bias_N is None else scores + bias_N.to(scores.dtype)
    if groups > 1:
        members = ranked.unflatten(1, (groups, ranked.shape[1] // groups))
        counting = 1 if bias_N is None else 2
        best = members.topk(counting, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, _largest(best, kept_groups), True)
        ranked = members.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = _largest(ranked, k)
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, chosen.to(torch.int32)


@moe_route.fake(traceable=True)
def _(logits_TN: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    T = logits_TN.shape[0]
    weights = logits_TN.new_empty(T, routing.width, dtype=torch.promote_types(logits_TN.dtype, torch.float32))
    return weights, torch.empty_like(weights, dtype=torch.int32)


def _largest(values: Tensor, k: int) -> Tensor:
    """Where the k largest of each row are, the largest first, of equal ones the first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def _sparsemixer(logits: Tensor, k: int, jitter: float, scale: float) -> tuple[Tensor, Tensor]:
    left, weights, chosen = logits, [], []
    for _ in range(k):
        best, at = left.max(-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        weights.append(torch.softmax(left.masked_fill(far, float("-inf")), -1).gather(1, at))
        chosen.append(at)
        left = left.scatter(1, at, float("-inf"))
    return torch.cat(weights, 1) * scale, torch.cat(chosen, 1).to(torch.int32)
