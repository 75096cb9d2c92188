"""What is changed in the logits of rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Changes(NamedTuple):
    """Mask, bias and penalties of S rows, and the state of N slots.

    slot_S: the row's slot in the three tensors of state, [S] int32.
    mask_row_S: a row of mask_SW, -1 where all tokens are allowed, [S] int32.
    mask_SW: bit t % 32 of word t // 32 says that token t is allowed, [S, ceil(V / 32)] int32.
    bias_count_S: how many of the first entries of the slot's list are added, [S] int32.
    repetition_S: divides the positive logits and multiplies the others of tokens that were sampled or are in the
        prompt; 1 is off; [S] float32.
    frequency_S: times the number of times sampled is subtracted; 0 is off; [S] float32.
    presence_S: is subtracted once from each token that was sampled; 0 is off; [S] float32.
    counts_NV: state. The low 30 bits say how many times a token was sampled, bit 30 whether the prompt has it;
        [N, V] int32.
    bias_token_NB: state, the tokens of a slot's list, no token twice among the added ones, [N, B] int32.
    bias_value_NB: state, what is added to them, [N, B] float32.
    """

    slot_S: Tensor
    mask_row_S: Tensor
    mask_SW: Tensor
    bias_count_S: Tensor
    repetition_S: Tensor
    frequency_S: Tensor
    presence_S: Tensor
    counts_NV: Tensor
    bias_token_NB: Tensor
    bias_value_NB: Tensor


class StepDrafts(NamedTuple):
    """The drafts of a step, which count as sampled for the rows after them.

    drafts_T: tokens, negative where there is none, [T] int32.
    logits_indices_S: the row's place in the step, [S] int32.
    place_S: number of drafts before the row, the last one at its own place; 0 for none; [S] int32.
    ancestors_T: as for `paged_attention`, [T] int64; None: -1 throughout. Only drafts count that have their bit set at
        the row's token, bit i for the i-th draft.
    """

    drafts_T: Tensor
    logits_indices_S: Tensor
    place_S: Tensor
    ancestors_T: Tensor | None = None
