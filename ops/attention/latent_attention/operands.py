"""What latent attention takes: rows of a step, up-projections, and the cache with the places of sequences in it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LatentRows(NamedTuple):
    """The T tokens of a step, sequence after sequence. Rows may be strided, the last dimension is contiguous.

    q_nope_THN: the part of queries without positions, [T, H, N].
    q_rope_THR: their rotated part, [T, H, R].
    latent_TL: normalized latents, [T, L], of which keys and values of all heads are made.
    k_rope_TR: the rotated part of the keys, the same for all heads, [T, R].
    """

    q_nope_THN: Tensor
    q_rope_THR: Tensor
    latent_TL: Tensor
    k_rope_TR: Tensor


class UpProjections(NamedTuple):
    """What makes keys and values of a latent.

    k_up_HNL: the part of each head's keys without positions, [H, N, L].
    v_up_HVL: the values of each head, [H, V, L].
    """

    k_up_HNL: Tensor
    v_up_HVL: Tensor


class PagedLatents(NamedTuple):
    """The cache and a ragged batch of S sequences in it.

    latent_cache: B blocks of P tokens, one row for each, [B, P, C]; written in place. See `latent_state`.
    block_table: the blocks of each sequence, [S, N] int32.
    query_start_loc: sequence s owns rows query_start_loc[s]:query_start_loc[s+1], possibly none; [S+1] int32.
    seq_lens: the tokens of each sequence including these rows, [S] int32.
    """

    latent_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
