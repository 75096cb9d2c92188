"""A step to tune ssd_scan on."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.ssd_scan.op import ssd_scan
from graphllm.ops.recurrent.tuning_slots import tuning_slots


@ssd_scan.tuning_inputs
def tuning_step(x_THP: Tensor, A_H: Tensor, state: Tensor, at: Slots) -> dict[str, Tensor]:
    """Decays, where sequences and their states are, and no more states than these."""
    states = state.new_zeros((at.slots.shape[0] + 1, *state.shape[1:]))
    return {"A_H": torch.full_like(A_H, -1.0), "state": states, **tuning_slots(x_THP.shape[0], at)}
