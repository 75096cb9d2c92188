"""A step to tune causal_conv on."""

from __future__ import annotations

from torch import Tensor

from graphllm.ops.recurrent.causal_conv.op import causal_conv
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.tuning_slots import tuning_slots


@causal_conv.tuning_inputs
def tuning_step(x_TD: Tensor, at: Slots) -> dict[str, Tensor]:
    """Where sequences and their states are."""
    return tuning_slots(x_TD.shape[0], at)
