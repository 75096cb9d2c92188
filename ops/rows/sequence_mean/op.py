"""sequence_mean: the mean of the rows of a sequence, up to a row of it."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(x_TD: Tensor, query_start_loc: Tensor, rows_R: Tensor) -> Cost:
    return Cost(nbytes(x_TD) + 4 * rows_R.shape[0] * x_TD.shape[1], x_TD.numel())


@op(boundary=True, cost=_cost)
def sequence_mean(x_TD: Tensor, query_start_loc: Tensor, rows_R: Tensor) -> Tensor:
    """For each r the mean of the rows of x from the beginning of the sequence that row rows_R[r] belongs to, up to it.

    x_TD [T, D], rows contiguous; query_start_loc [S+1] int32: sequence s owns rows
    query_start_loc[s]:query_start_loc[s+1], possibly none; rows_R [R] int32. Returns [R, D] float32 (float64 for
    float64 inputs), in which sums are made, too; unspecified for rows at or after query_start_loc[S].
    Source: Reimers & Gurevych 2019, Sentence-BERT (mean pooling).
    """
    out_RD = torch.zeros(
        (rows_R.shape[0], x_TD.shape[1]), dtype=torch.promote_types(x_TD.dtype, torch.float32), device=x_TD.device
    )
    starts = query_start_loc.tolist()
    for r, row in enumerate(rows_R.tolist()):
        first = max((a for a, b in itertools.pairwise(starts) if a <= row < b), default=row)
        out_RD[r] = x_TD[first : row + 1].to(out_RD.dtype).mean(0)
    return out_RD


@sequence_mean.fake
def _(x_TD: Tensor, rows_R: Tensor) -> Tensor:
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    return x_TD.new_empty((rows_R.shape[0], x_TD.shape[1]), dtype=dtype)
