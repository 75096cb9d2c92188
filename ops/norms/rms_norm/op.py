"""rms_norm: scale each row to unit root mean square."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(x: Tensor, weight: Tensor) -> Cost:
    return Cost(2 * nbytes(x) + nbytes(weight), 4 * x.numel())


@op(cost=_cost, rowwise=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2, last) + eps) * (offset + weight), in x's dtype and shape.

    x [..., D]; weight [D], in x's dtype or a wider one. offset 0 is Llama's form: the normalized row is rounded to x's
    dtype *before* the weight is applied. With offset 1, Gemma's form, or a wider weight, it multiplies in float32 and
    rounds once. Source: Zhang & Sennrich 2019.
    """
    wide = x.double() if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset or weight.dtype.itemsize > x.dtype.itemsize:
        return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)
    return normed.to(x.dtype) * weight.to(x.dtype)


@rms_norm.fake(traceable=True)
def _(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(weight.shape == x.shape[-1:], lambda: f"weight {weight.shape} for rows of {x.shape[-1]}")
    return torch.empty_like(x)
