"""record_drafts: a drafted token becomes part of the slots' state, for verification and for the next draft."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(tokens_SJ: Tensor, positions_S: Tensor) -> Cost:
    return Cost(2 * nbytes(tokens_SJ) + 5 * nbytes(positions_S), 0)


@op(cost=_cost, mutates=("drafts_NK", "count_N", "token_N", "position_N"))
def record_drafts(
    tokens_SJ: Tensor,
    positions_S: Tensor,
    places_S: Tensor,
    slots_S: Tensor,
    drafts_NK: Tensor,
    count_N: Tensor,
    token_N: Tensor,
    position_N: Tensor,
    last_position: int,
) -> None:
    """Write J drafts for each of the slots slots_S [S], which differ but for the last one, the scrap one of padding.

    tokens_SJ [S, J] int32 go to drafts_NK [N, K] from places_S [S] on; tokens after the last place are dropped. What
    drafts the next one is remembered: count_N [N], the next place; token_N [N], the last one; position_N [N], where
    the row of the next run stands, one after positions_S [S] and at most last_position. In the scrap slot all are
    unspecified.
    """
    J, K = tokens_SJ.shape[1], drafts_NK.shape[1]
    slots, places = slots_S.long(), places_S.long().clamp(max=K - 1)
    for j in range(min(J, K)):
        place = places + j
        old = drafts_NK[slots, place.clamp(max=K - 1)]
        drafts_NK.index_put_((slots, place.clamp(max=K - 1)), torch.where(place < K, tokens_SJ[:, j], old))
    count_N.index_put_((slots,), (places + J).clamp(max=K).to(count_N.dtype))
    token_N.index_put_((slots,), tokens_SJ[:, -1])
    position_N.index_put_((slots,), (positions_S + 1).clamp(max=last_position))
