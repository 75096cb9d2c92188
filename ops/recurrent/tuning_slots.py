"""Where the sequences of a step are that recurrent ops are tuned on."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.recurrent.slots import Slots


def tuning_slots(T: int, at: Slots) -> dict[str, Tensor]:
    """The fields of `Slots`, of given shapes and device: all sequences have a token, and what is left of T is a prompt
    of the last one."""
    S, device = at.slots.shape[0], at.slots.device
    starts = torch.arange(S + 1, dtype=torch.int32, device=device).clamp(max=T)
    starts[S] = T
    return {
        "query_start_loc": starts,
        "slots": torch.randperm(S, device=device).to(torch.int32),
        "state_versions": torch.zeros(S, dtype=torch.int32, device=device),
    }
