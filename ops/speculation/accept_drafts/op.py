"""accept_drafts: which drafted tokens a step keeps, decided where its tokens were sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(tokens_R: Tensor, slots_S: Tensor) -> Cost:
    return Cost(4 * nbytes(tokens_R) + 6 * nbytes(slots_S), tokens_R.numel())


@op(cost=_cost, mutates=("rejected_N", "version_N"))
def accept_drafts(
    tokens_R: Tensor,
    logits_indices_R: Tensor,
    row_slots_R: Tensor,
    drafts_T: Tensor,
    sequence_ids_T: Tensor,
    query_start_loc: Tensor,
    row_start_loc: Tensor,
    slots_S: Tensor,
    rejected_N: Tensor,
    version_N: Tensor,
    versions: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep of each sequence the longest run of sampled tokens that its drafts foresaw, and one token after it.

    tokens_R [R]: sampled from the rows logits_indices_R [R] of the step's T tokens, each with its own random numbers,
    -1 for none. Row i of a sequence samples what comes after its token i, so it is kept where all rows before it
    sampled the drafts drafts_T [T] that follow them: what is kept is what would be sampled without drafts, token by
    token. sequence_ids_T [T]: the sequence of each token. query_start_loc, row_start_loc [S+1]: where each sequence's
    tokens and rows begin. row_slots_R [R], slots_S [S]: slots, the last one is the scrap one of padding. A sequence has
    drafts where it has several rows and its first one has a slot; then each of its tokens has a row. Of others the last
    row is kept.

    Written at slots_S: rejected_N [N], rows that are not kept; version_N [N], the version of recurrent states that is
    valid from now on: a step of n tokens leaves the state after its token i at version i, of at most ``versions``.
    Returns row_slots_R with the scrap slot but for each sequence's last kept row; the same with the slot in all kept
    rows; how many are kept [S], 0 for sequences without rows; and how many drafts there were [S], up to the first that
    is negative. Of padding all are unspecified. Source: Leviathan et al. 2023 (speculative sampling; the proposal is
    one token, so sampling again and comparing is the same as accepting by probability).
    """
    R, T, scrap = tokens_R.shape[0], drafts_T.shape[0], rejected_N.shape[0] - 1
    first_S, rows_S = row_start_loc[:-1].long(), (row_start_loc[1:] - row_start_loc[:-1]).long()
    next_R = drafts_T[(logits_indices_R.long() + 1).clamp(max=T - 1)]
    # Rows after the last one are looked at, too, where there is none.
    past = row_slots_R.new_full((1,), scrap)
    slots_R = torch.cat([row_slots_R, past])
    right_R = torch.cat([(tokens_R == next_R) & (tokens_R >= 0), past < 0])
    there_R = torch.cat([next_R >= 0, past < 0])
    kept_S = (rows_S > 0).long()
    run_S = there_S = drafted_S = (rows_S > 1) & (slots_R[first_S] != scrap)
    count_S = torch.zeros_like(kept_S)
    for i in range(versions - 1):
        at_S, there_S = (first_S + i).clamp(max=R), there_S & (i + 1 < rows_S)
        there_S = there_S & there_R[at_S]
        run_S = run_S & there_S & right_R[at_S]
        kept_S, count_S = kept_S + run_S.long(), count_S + there_S.long()
    sequence_R = sequence_ids_T.long()[logits_indices_R.long()]
    row_R = torch.arange(R, device=tokens_R.device)
    end_S = first_S + torch.where(drafted_S, kept_S, rows_S) - 1
    rejected_S = torch.where(drafted_S, rows_S - kept_S, 0)
    tokens_S = (query_start_loc[1:] - query_start_loc[:-1]).long()
    version_S = (tokens_S.clamp(max=versions) - 1 - rejected_S).clamp(min=0)
    rejected_N.index_put_((slots_S.long(),), rejected_S.to(rejected_N.dtype))
    version_N.index_put_((slots_S.long(),), version_S.to(version_N.dtype))
    end_R = end_S[sequence_R]
    newest_R = torch.where(row_R == end_R, row_slots_R, scrap)
    kept_R = torch.where(row_R <= end_R, row_slots_R, scrap)
    return newest_R, kept_R, kept_S.to(torch.int32), count_S.to(torch.int32)


@accept_drafts.fake(traceable=True)
def _(row_slots_R: Tensor, slots_S: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (R,), (S,) = row_slots_R.shape, slots_S.shape
    return (
        row_slots_R.new_empty(R),
        row_slots_R.new_empty(R),
        slots_S.new_empty(S, dtype=torch.int32),
        slots_S.new_empty(S, dtype=torch.int32),
    )
