"""One step of training, the same in every training script."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def descend(loss: torch.Tensor, parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Move the parameters along the gradient of a loss, its norm clipped to 1."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
