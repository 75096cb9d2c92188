"""ngram_drafts: what a text has said before is what it may say again, guessed where its tokens were sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op

LONGEST_RUN = 16  # tokens that are counted of a run


def _cost(tokens_R: Tensor, history_NL: Tensor, drafts_NK: Tensor, largest: int) -> Cost:
    R, looked = tokens_R.shape[0], tokens_R.shape[0] * history_NL.shape[1]
    return Cost(4 * nbytes(tokens_R) + 4 * looked + 4 * R * drafts_NK.shape[1], looked * largest)


@op(cost=_cost, mutates=("history_NL", "drafts_NK"))
def ngram_drafts(
    tokens_R: Tensor,
    positions_R: Tensor,
    slots_R: Tensor,
    newest_R: Tensor,
    history_NL: Tensor,
    drafts_NK: Tensor,
    smallest: int,
    largest: int,
) -> Tensor:
    """Append each sequence's new tokens to its history, and guess the next K from where its last tokens stood before.

    newest_R [R] int32: the slot of a row that ends a sequence, else the last slot, the scrap one. tokens_R [R] int32:
    sampled, -1 for nothing; positions_R [R] int32: where each one stands in its sequence; slots_R [R] int32: its slot,
    or the scrap one. The row that ends a sequence and up to K before it that have its slot too are appended, the token
    at position p to history_NL [N, L] int32 at p % L, 0 for nothing. So a history holds the last L tokens; the K oldest
    may be overwritten and are not looked at; L is larger than K + largest.

    drafts_NK [N, K] int32 of that slot becomes what followed the latest of the longest runs that equal the last tokens,
    of ``smallest`` to ``largest``; where that reaches the end, it goes on with what it says itself. -1, all of them,
    where there is no run. The scrap slot stays as it is.

    Returns [R] int32, of a row that ends a sequence how many of its last tokens also stood before the place that the
    guess continues, up to LONGEST_RUN, however few were looked up: the more, the surer the guess. 0 without a guess,
    and of other rows. Source: prompt lookup decoding (Saxena 2023).
    """
    (N, L), (R,), K = history_NL.shape, tokens_R.shape, drafts_NK.shape[1]
    slots, newest, positions = slots_R.long(), newest_R.long(), positions_R.long()
    ahead = torch.nn.functional.pad(newest, (0, K), value=N - 1)
    ended = torch.stack([ahead[i : i + R] for i in range(K + 1)])
    appended = (ended == slots).any(0) & (slots != N - 1)
    at = (torch.where(appended, slots, N - 1), positions % L)
    history_NL.index_put_(at, torch.where(appended, tokens_R.clamp(min=0), history_NL[at]))

    history = history_NL[newest]
    place = torch.arange(L, device=tokens_R.device)
    age = (positions.unsqueeze(1) - place) % L  # of what lies there: 0 for the newest token
    same = torch.ones_like(age, dtype=torch.bool)
    length = torch.zeros_like(age)
    for i in range(largest):
        last = history.gather(1, ((positions - i) % L).unsqueeze(1))
        there = (age + i < L - K) & (age + i <= positions.unsqueeze(1))
        same = same & there & (history.roll(i, 1) == last)
        length = length + same
    score = torch.where((age > 0) & (length >= smallest), length * L - age, 0)
    back = age.gather(1, score.argmax(1, keepdim=True))
    found = score.amax(1, keepdim=True) > 0
    ahead_K = torch.arange(K, device=tokens_R.device) % back.clamp(min=1)
    drafts = history.gather(1, (positions.unsqueeze(1) - back + 1 + ahead_K) % L)
    drafts = torch.where(found, drafts, -1)
    drafts_NK.index_put_((newest,), torch.where((newest == N - 1).unsqueeze(1), drafts_NK[newest], drafts))

    offset = torch.arange(LONGEST_RUN, device=tokens_R.device)
    last_R, then_R = positions.unsqueeze(1) - offset, positions.unsqueeze(1) - back - offset
    compared = (back + offset < L - K) & (then_R >= 0)
    equal = compared & (history.gather(1, last_R % L) == history.gather(1, then_R % L))
    run = torch.where(found & (newest != N - 1).unsqueeze(1), equal.long(), 0).cumprod(1).sum(1)
    return run.to(torch.int32)


@ngram_drafts.fake(traceable=True)
def _(tokens_R: Tensor) -> Tensor:
    return tokens_R.new_empty(tokens_R.shape[0], dtype=torch.int32)
