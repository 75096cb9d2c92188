"""A step to tune gated_delta on."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.recurrent.gated_delta.op import gated_delta
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.tuning_slots import tuning_slots


@gated_delta.tuning_inputs
def tuning_step(v_THV: Tensor, g: Tensor, state: Tensor, at: Slots) -> dict[str, Tensor]:
    """Decays, where sequences and their states are, and no more states than these."""
    states = state.new_zeros((at.slots.shape[0] + 1, *state.shape[1:]))
    return {"g": torch.full_like(g, -0.5), "state": states, **tuning_slots(v_THV.shape[0], at)}
