"""layer_norm: scale each row to zero mean and unit variance."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None) -> Cost:
    return Cost(2 * nbytes(x) + nbytes(weight, bias), 7 * x.numel())


@op(cost=_cost, rowwise=True)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in x's dtype and shape, contiguous.

    x [..., D], D > 0; weight and bias [D]. Statistics and products are float32 (float64 for float64 inputs), rounded
    once at the end. Source: Ba, Kiros & Hinton 2016.
    """
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@layer_norm.fake(traceable=True)
def _(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(weight.shape == x.shape[-1:], lambda: f"weight {weight.shape} for rows of {x.shape[-1]}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)
