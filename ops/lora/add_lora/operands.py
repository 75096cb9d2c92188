"""What ops take of the low-rank adapters of a step's tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LowRank(NamedTuple):
    """The tables of L adapters of rank r of a layer of n matrices, such as q, k and v. Entry 0 is never read.

    a_LRI: r rows for each matrix, [L, n r, I].
    b_LrO: [L, r, O]. Smaller ranks are padded with zeros, scales are multiplied into B.
    adapter_ids_T: the entry of each token, 0 for tokens without an adapter, [T] int32.
    widths: columns of each matrix, which add up to O.
    """

    a_LRI: Tensor
    b_LrO: Tensor
    adapter_ids_T: Tensor
    widths: list[int]
