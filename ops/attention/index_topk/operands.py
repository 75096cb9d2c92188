"""What index_topk takes: rows of a step, and the cache of keys with the places of sequences in it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class IndexRows(NamedTuple):
    """The T tokens of a step, sequence after sequence. Rows may be strided, the last dimension is contiguous.

    index_q_THE: queries of the index heads, [T, H, E].
    index_k_TE: the key of each token, the same for all heads, [T, E].
    index_weights_TH: factors of the heads, float32 [T, H].
    """

    index_q_THE: Tensor
    index_k_TE: Tensor
    index_weights_TH: Tensor


class PagedKeys(NamedTuple):
    """The cache and a ragged batch of S sequences in it.

    index_cache: B blocks of P keys, [B, P, E] in the dtype of rows; written in place.
    block_table: the blocks of each sequence, [S, N] int32.
    query_start_loc: sequence s owns rows query_start_loc[s]:query_start_loc[s+1], possibly none; [S+1] int32.
    seq_lens: the tokens of each sequence including these rows, [S] int32.
    """

    index_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
