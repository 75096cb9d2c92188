"""A step to tune selective_scan on."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.recurrent.selective_scan.op import selective_scan
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.tuning_slots import tuning_slots


@selective_scan.tuning_inputs
def tuning_step(x_TD: Tensor, A_DN: Tensor, at: Slots) -> dict[str, Tensor]:
    """Decays, and where sequences and their states are."""
    return {"A_DN": torch.full_like(A_DN, -1.0), **tuning_slots(x_TD.shape[0], at)}
