"""record_draft_probs: the distribution that a draft is drawn from, kept for the draft's verification."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(logits_SV: Tensor) -> Cost:
    return Cost(3 * nbytes(logits_SV), 5 * logits_SV.numel())


@op(cost=_cost, mutates=("probs_NKV",))
def record_draft_probs(
    logits_SV: Tensor,
    temperature_S: Tensor,
    places_S: Tensor,
    slots_S: Tensor,
    probs_NKV: Tensor,
    ids_V: Tensor | None = None,
) -> None:
    """Write what `sample` draws from, without filters, to the slots slots_S [S], which differ but for the last one, the
    scrap one of padding.

    softmax(logits_SV / temperature_S), computed in float32, goes to probs_NKV [N, K, V] float32 at [slots_S, places_S],
    places_S [S] int32; a place after the last one is dropped. temperature_S [S] float32; where it is 0, 1 stands for
    it, since the drafts of greedy requests are accepted by no probability. ids_V: the tokens that logits_SV are of,
    which differ, where these are not all; the others get 0. In the scrap slot all is unspecified.
    """
    N, K, V = probs_NKV.shape
    heat_S = torch.where(temperature_S > 0, temperature_S, 1.0)
    q_SV = torch.softmax(logits_SV.float() / heat_S[:, None], dim=-1)
    if ids_V is not None:
        q_SV = q_SV.new_zeros((q_SV.shape[0], V)).index_copy(1, ids_V.long(), q_SV)
    slots = torch.where(places_S < K, slots_S.long(), N - 1)
    probs_NKV.index_put_((slots, places_S.long().clamp(max=K - 1)), q_SV)
