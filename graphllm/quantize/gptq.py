"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and those that are left make up for the error.

The scales are fixed before, so columns may be taken by the size of their activations while groups stay in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.quantize.schemes import Grid

_BLOCK = 128  # columns whose corrections of the others are gathered
_DAMPS = (0.01, 0.1, 1.0)  # of the mean of the diagonal, added to it: as little as does


def gptq(weight_OI: Tensor, gram_II: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Levels and the numbers that they stand for, with little error of weight times inputs. gram_II: the sum of
    inputs' outer products."""
    inner = weight_OI.shape[1]
    diagonal = gram_II.diagonal()
    order = diagonal.argsort(descending=True)
    factor = _factor(gram_II[order][:, order])
    left = weight_OI[:, order].clone()
    levels, numbers = torch.empty_like(left), torch.empty_like(left)
    of = order // grid.group
    scales, zeros = grid.scales[:, of], grid.zeros[:, of]
    for start in range(0, inner, _BLOCK):
        stop = min(start + _BLOCK, inner)
        errors = torch.empty_like(left[:, start:stop])
        for i in range(start, stop):
            levels[:, i], numbers[:, i] = grid.columns(scales[:, i], zeros[:, i], left[:, i])
            error = (left[:, i] - numbers[:, i]) / factor[i, i]
            left[:, i:stop] -= error.unsqueeze(1) * factor[i, i:stop]
            errors[:, i - start] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    back = order.argsort()
    return levels[:, back], numbers[:, back]


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
