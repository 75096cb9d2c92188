"""rope: rotate queries or keys by their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(x_THE: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Cost:
    return Cost(2 * nbytes(x_THE) + nbytes(cos_TF, sin_TF), 6 * x_THE.shape[0] * x_THE.shape[1] * cos_TF.shape[1])


@op(cost=_cost, rowwise=True)
def rope(x_THE: Tensor, cos_TF: Tensor, sin_TF: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first 2F entries of each head; the others pass. Returns [T, H, E] in x's dtype, contiguous.

    x_THE [T, H, E], E >= 2F, rows may be strided. cos_TF, sin_TF [T, F] from `rope_table`, first rounded to x's dtype.
    Entry f < F is paired with entry F + f (the "rotate half" layout of the Hugging Face checkpoints):
    out[f] = x[f] cos[f] - x[F+f] sin[f], out[F+f] = x[F+f] cos[f] + x[f] sin[f].
    interleaved: entry 2f is paired with entry 2f + 1 instead, and results lie where the entries did.
    Source: Su et al. 2021.
    """
    F = cos_TF.shape[1]
    cos, sin = cos_TF.to(x_THE.dtype)[:, None], sin_TF.to(x_THE.dtype)[:, None]
    if interleaved:
        first, second = x_THE[..., : 2 * F].unflatten(-1, (F, 2)).unbind(-1)
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((pairs.flatten(-2), x_THE[..., 2 * F :]), dim=-1)
    first, second = x_THE[..., :F], x_THE[..., F : 2 * F]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x_THE[..., 2 * F :]), dim=-1)


@rope.fake(traceable=True)
def _(x_THE: Tensor, cos_TF: Tensor) -> Tensor:
    torch._check(x_THE.shape[2] >= 2 * cos_TF.shape[1], lambda: f"{cos_TF.shape[1]} angles, heads of {x_THE.shape[2]}")
    return torch.empty_like(x_THE, memory_format=torch.contiguous_format)
