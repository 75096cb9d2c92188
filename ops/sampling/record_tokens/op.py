"""record_tokens: what was sampled becomes part of the slots' state on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(tokens_S: Tensor, slot_S: Tensor, counted_S: Tensor) -> Cost:
    return Cost(2 * nbytes(tokens_S) + nbytes(slot_S, counted_S) + 3 * nbytes(tokens_S), tokens_S.numel())


@op(boundary=True, mutates=("last_token_N", "counts_NV"), cost=_cost)
def record_tokens(
    tokens_S: Tensor, slot_S: Tensor, kept_slot_S: Tensor, counted_S: Tensor, last_token_N: Tensor, counts_NV: Tensor
) -> Tensor:
    """Remember each row's sampled token in its slot: the next step feeds it, penalties count it.

    tokens_S [S] int32: what `sample` gave, -1 for nothing. slot_S [S] int32: rows of the state; all different, but for
    the last slot, the scrap one that padding rows share. last_token_N [N] int32: becomes the token, 0 for nothing;
    which one in the scrap slot is unspecified. kept_slot_S [S] int32: the slot that the token becomes a part of, which
    several rows may share where drafts are verified; the scrap one for a token that is not kept. counted_S [S] int32:
    where positive, and a token is kept, counts_NV [N, V] int32 of its slot grows by one at it. Bit 30 of a count is a
    flag that stays, see `process_logits`. Returns a copy of tokens_S, contiguous.
    """
    kept, token = kept_slot_S.long(), tokens_S.clamp(min=0)
    last_token_N.index_put_((slot_S.long(),), token)
    once = ((counted_S > 0) & (tokens_S >= 0) & (kept != counts_NV.shape[0] - 1)).to(counts_NV.dtype)
    counts_NV.index_put_((kept, token.long()), once, accumulate=True)
    return tokens_S.clone(memory_format=torch.contiguous_format)


@record_tokens.fake(traceable=True)
def _(tokens_S: Tensor) -> Tensor:
    return torch.empty_like(tokens_S, memory_format=torch.contiguous_format)
