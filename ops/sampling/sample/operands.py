"""What tokens are drawn with, for each row."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sampling(NamedTuple):
    """The parameters of S rows.

    temperature_S: 0 means greedy (the lowest id among equal maxima), else logits are divided by it; [S] float32.
    top_k_S: keep the k largest logits, ties with the k-th kept; 0 is off; [S] int32.
    top_p_S: of what is left, keep the most likely tokens until their (renormalized) mass reaches p, ties with the last
        kept; 1 is off; [S] float32.
    min_p_S: drop tokens less likely than min_p times the most likely; 0 is off; [S] float32.
    seed_S: of the row's random numbers, [S] int64.
    sample_index_S: how many tokens were drawn with the seed before, [S] int32.
    """

    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    seed_S: Tensor
    sample_index_S: Tensor
