"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and those that are left make up for the error.

The scales are fixed before, so columns may be taken by the size of their activations while groups stay in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.quantize.schemes import Grid

_BLOCK = 128  # columns whose corrections of the others are gathered
_DAMP = 0.01  # of the mean of the diagonal, added to it


def gptq(weight_OI: Tensor, gram_II: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Levels and the numbers that they stand for, with little error of weight times inputs. gram_II: the sum of
    inputs' outer products."""
    inner = weight_OI.shape[1]
    diagonal = gram_II.diagonal()
    order = diagonal.argsort(descending=True)
    hessian = gram_II[order][:, order].clone()
    hessian.diagonal().add_(_DAMP * diagonal.mean() + torch.finfo(torch.float32).tiny)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
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
