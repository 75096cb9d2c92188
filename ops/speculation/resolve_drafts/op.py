"""resolve_drafts: the token ids, positions and lengths of a step that was planned before its drafts were verified."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(token_ids_T: Tensor, seq_lens_S: Tensor) -> Cost:
    return Cost(6 * nbytes(token_ids_T) + 4 * nbytes(seq_lens_S), token_ids_T.numel())


@op(cost=_cost)
def resolve_drafts(
    token_ids_T: Tensor,
    positions_T: Tensor,
    context_lens_T: Tensor,
    seq_lens_S: Tensor,
    sequence_ids_T: Tensor,
    query_start_loc: Tensor,
    slots_S: Tensor,
    pending_S: Tensor,
    last_token_N: Tensor,
    drafts_NK: Tensor,
    rejected_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the host left open, filled in from the slots' states; all int32.

    token_ids_T [T]: a negative id stands for what the slot of the token's sequence has: the token last sampled where it
    is the sequence's first of the step, else its draft of that place. positions_T, context_lens_T [T], seq_lens_S [S]:
    as if every draft of the step in flight had been kept. sequence_ids_T [T]: the sequence of each token.
    query_start_loc [S+1], slots_S [S]. pending_S [S]: 1 where the step in flight verifies drafts of the sequence; what
    it rejected, rejected_N [N], is then taken off positions and lengths. last_token_N [N], drafts_NK [N, K].

    Returns token ids [T], none negative; drafts [T], the same with -1 where there is no draft or token; positions [T],
    context lengths [T], sequence lengths [S]. For padding they are unspecified but not negative.
    """
    sequence_T = sequence_ids_T.long()
    slot_T = slots_S.long()[sequence_T]
    back_S = torch.where(pending_S > 0, rejected_N[slots_S.long()], 0)
    back_T = back_S[sequence_T]
    place_T = torch.arange(token_ids_T.shape[0], device=token_ids_T.device) - query_start_loc[sequence_T]
    draft_T = drafts_NK[slot_T, (place_T - 1).clamp(0, drafts_NK.shape[1] - 1)]
    known_T = torch.where(place_T > 0, draft_T, last_token_N[slot_T])
    drafts_T = torch.where(token_ids_T < 0, known_T, token_ids_T)
    return (
        drafts_T.clamp(min=0),
        drafts_T,
        (positions_T - back_T).clamp(min=0),
        (context_lens_T - back_T).clamp(min=0),
        (seq_lens_S - back_S).clamp(min=0),
    )


@resolve_drafts.fake(traceable=True)
def _(
    token_ids_T: Tensor, positions_T: Tensor, context_lens_T: Tensor, seq_lens_S: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_T = token_ids_T.shape
    return (
        token_ids_T.new_empty(of_T),
        token_ids_T.new_empty(of_T),
        positions_T.new_empty(of_T),
        context_lens_T.new_empty(of_T),
        seq_lens_S.new_empty(seq_lens_S.shape),
    )
