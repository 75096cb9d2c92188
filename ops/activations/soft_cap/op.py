"""soft_cap: squash values into an open interval, as some models do with their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(x: Tensor) -> Cost:
    return Cost(2 * nbytes(x), 3 * x.numel())


@op(cost=_cost, rowwise=True)
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in x's dtype and shape, contiguous.

    x of any shape. cap: positive. Every operation is rounded to x's dtype. Source: Gemma 2 report 2024.
    """
    return torch.tanh(x / cap) * cap
