"""process_logits: what a request asks to change in its logits before a token is sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.sampling.process_logits.operands import Changes, StepDrafts

IN_PROMPT = 1 << 30  # flag in a token's count


def _cost(logits_SV: Tensor) -> Cost:
    return Cost(nbytes(logits_SV) + 4 * logits_SV.numel(), logits_SV.numel())


@op(boundary=True, cost=_cost)
def process_logits(logits_SV: Tensor, changes: Changes, step: StepDrafts) -> Tensor:
    """Mask, bias and penalties on each row of logits, in this order and in float32.

    logits_SV [S, V], any float dtype. Banned tokens become -inf. A row that verifies a draft sees what plain decoding
    would have there. Returns [S, V] float32,
    contiguous (float64 for float64). NaN stays NaN unless banned. A row with all of it off is
    copied: implementations read a row's mask, list and counts only where something of theirs is on.
    Source: Keskar et al. 2019 (CTRL, repetition penalty); OpenAI API reference (logit bias, frequency and presence
    penalty).
    """
    slot_S, mask_row_S, mask_SW, bias_count_S, repetition_S, frequency_S, presence_S, *state = changes
    counts_NV, bias_token_NB, bias_value_NB = state
    drafts_T, logits_indices_S, place_S, ancestors_T = step
    dtype = torch.promote_types(logits_SV.dtype, torch.float32)
    slot = slot_S.long()
    token_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    words_SV = mask_SW[mask_row_S.clamp(min=0).long()][:, token_V // 32]
    banned_SV = (mask_row_S >= 0)[:, None] & ((words_SV >> (token_V % 32)) & 1 == 0)
    x_SV = logits_SV.to(dtype).masked_fill(banned_SV, float("-inf"))

    listed_SB = torch.arange(bias_token_NB.shape[1], device=logits_SV.device) < bias_count_S[:, None]
    bias_token_SB = torch.where(listed_SB, bias_token_NB[slot], 0).long()
    bias_value_SB = torch.where(listed_SB, bias_value_NB[slot], 0.0).to(dtype)
    x_SV = x_SV.scatter_add(1, bias_token_SB, bias_value_SB)

    step_T, at_S = torch.arange(drafts_T.shape[0], device=drafts_T.device), logits_indices_S.long()
    before_ST = (step_T <= at_S[:, None]) & (step_T > (at_S - place_S)[:, None]) & (drafts_T >= 0)
    if ancestors_T is not None:
        number_ST = (step_T - (at_S - place_S)[:, None]).clamp(0, 62)
        before_ST &= (ancestors_T[at_S][:, None] >> number_ST) & 1 > 0
    # Of rows that no row counts, entries may be anything, such as positions where there are no drafts at all.
    drafts_ST = drafts_T.clamp(0, counts_NV.shape[1] - 1).long().expand(before_ST.shape)
    counts_SV = counts_NV[slot].scatter_add(1, drafts_ST, before_ST.to(counts_NV.dtype))
    times_SV = counts_SV & (IN_PROMPT - 1)
    repetition = repetition_S.to(dtype)[:, None]
    x_SV = torch.where(counts_SV != 0, torch.where(x_SV > 0, x_SV / repetition, x_SV * repetition), x_SV)
    x_SV = x_SV - frequency_S.to(dtype)[:, None] * times_SV
    return x_SV - presence_S.to(dtype)[:, None] * (times_SV > 0)


@process_logits.fake(traceable=True)
def _(logits_SV: Tensor) -> Tensor:
    return logits_SV.new_empty(logits_SV.shape, dtype=torch.promote_types(logits_SV.dtype, torch.float32))
