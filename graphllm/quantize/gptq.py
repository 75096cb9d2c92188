"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and those that are left make up for the error.

The scales are fixed before, so columns may be taken by the size of their activations while groups stay in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.quantize.schemes import Grid

_BLOCK = 128  # columns that correct the later columns together
_DAMPS = (0.01, 0.1, 1.0)  # of the mean of the diagonal, added to it: as little as does


def gptq(weight_OI: Tensor, gram_II: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Levels and the numbers that they stand for, with little error of weight times inputs. gram_II: the sum of
    inputs' outer products."""
    inner = weight_OI.shape[1]
    order = gram_II.diagonal().argsort(descending=True)
    factor = _factor(gram_II[order][:, order])
    groups = (order // grid.group).tolist()
    scales, zeros = grid.scales.T.contiguous(), grid.zeros.T.contiguous()
    left = weight_OI.T[order].contiguous()  # a column of the matrix in one stretch of memory
    levels, numbers = torch.empty_like(left), torch.empty_like(left)
    for start in range(0, inner, _BLOCK):
        stop = min(start + _BLOCK, inner)
        errors = torch.empty_like(left[start:stop])
        for i in range(start, stop):
            levels[i], numbers[i] = grid.columns(scales[groups[i]], zeros[groups[i]], left[i])
            torch.div(left[i] - numbers[i], factor[i, i], out=errors[i - start])
            left[i:stop].addr_(factor[i, i:stop], errors[i - start], alpha=-1)
        left[stop:] -= factor[start:stop, stop:].T @ errors
    back = order.argsort()
    return levels[back].T, numbers[back].T.contiguous()


def _factor(gram_II: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse."""
    mean = gram_II.diagonal().mean() + torch.finfo(torch.float32).tiny
    for damp in _DAMPS:
        hessian = gram_II.clone()
        hessian.diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return factor
    raise ConfigError("calibration: a layer's inputs are not finite; use another text, or rtn")
