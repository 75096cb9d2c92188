"""record_drafts: a drafted token becomes part of the slots' state, for verification and for the draft behind it."""

from __future__ import annotations

from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(tokens_S: Tensor, hidden_SD: Tensor) -> Cost:
    return Cost(6 * nbytes(tokens_S) + 2 * nbytes(hidden_SD), 0)


@op(cost=_cost, mutates=("drafts_NK", "count_N", "token_N", "position_N", "hidden_ND"))
def record_drafts(
    tokens_S: Tensor,
    positions_S: Tensor,
    hidden_SD: Tensor,
    places_S: Tensor,
    slots_S: Tensor,
    drafts_NK: Tensor,
    count_N: Tensor,
    token_N: Tensor,
    position_N: Tensor,
    hidden_ND: Tensor,
    last_position: int,
) -> None:
    """Write one draft for each of the slots slots_S [S], which differ but for the last one, the scrap one of padding.

    tokens_S [S] int32 goes to drafts_NK [N, K] at places_S [S], at most K - 1. What drafts the next one is remembered:
    count_N [N], the place behind; token_N [N]; position_N [N], where the row of the next run stands, one behind
    positions_S [S] and at most last_position; hidden_ND [N, D], of the row that the token comes from. In the scrap slot
    all are unspecified.
    """
    slots, places = slots_S.long(), places_S.long().clamp(max=drafts_NK.shape[1] - 1)
    drafts_NK.index_put_((slots, places), tokens_S)
    count_N.index_put_((slots,), (places + 1).to(count_N.dtype))
    token_N.index_put_((slots,), tokens_S)
    position_N.index_put_((slots,), (positions_S + 1).clamp(max=last_position))
    hidden_ND.index_put_((slots,), hidden_SD.to(hidden_ND.dtype))
