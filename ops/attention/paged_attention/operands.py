"""What attention takes: the cache and where sequences are in it, how scores are computed, and the rotation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """The T tokens of a step, sequence after sequence. Rows may be strided, the last dimension is contiguous.

    q_THE: queries, [T, H, E]. H is a multiple of K.
    k_TKE, v_TKE: keys and values, [T, K, E].
    """

    q_THE: Tensor
    k_TKE: Tensor
    v_TKE: Tensor


class Paged(NamedTuple):
    """The cache and a ragged batch of S sequences in it.

    kv_cache: B blocks of P tokens, keys at index 0, values at 1, [B, 2, K, P, E]; written in place.
    block_table: the blocks of each sequence, [S, N] int32.
    query_start_loc: sequence s owns rows query_start_loc[s]:query_start_loc[s+1], possibly none; [S+1] int32.
    seq_lens: the tokens of each sequence including these rows, [S] int32.
    """

    kv_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class Scores(NamedTuple):
    """How scores are made of queries and keys.

    scale: factor on q.k.
    window: if positive, a token sees itself and the window - 1 tokens before it.
    softcap: if positive, scores become softcap * tanh(score / softcap) before the mask.
    sinks_H: one more score of each head, [H] in q's dtype. It is neither scaled nor capped nor masked, takes its part
        of the softmax and has no value.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks_H: Tensor | None = None


class Rotary(NamedTuple):
    """What queries and keys go through before attention.

    cos_TF, sin_TF: tables of `rope`, [T, F].
    q_norm_E, k_norm_E: weights of `rms_norm` over each head before the rotation, with offset 0, [E]; both or none.
    eps: of the norms.
    """

    cos_TF: Tensor
    sin_TF: Tensor
    q_norm_E: Tensor | None = None
    k_norm_E: Tensor | None = None
    eps: float = 0.0
