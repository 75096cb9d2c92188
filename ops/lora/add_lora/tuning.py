"""What ops with adapters in them are timed on."""

from __future__ import annotations

import torch
from torch import Tensor


def every_adapter(adapter_ids_T: Tensor | None, a_LRI: Tensor | None) -> dict[str, Tensor]:
    """Every adapter in turn, if there are any."""
    if adapter_ids_T is None or a_LRI is None:
        return {}
    t = torch.arange(adapter_ids_T.shape[0], device=adapter_ids_T.device, dtype=torch.int32)
    return {"adapter_ids_T": 1 + t % max(1, a_LRI.shape[0] - 1)}
