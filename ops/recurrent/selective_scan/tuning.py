"""A step to tune selective_scan on: all sequences have a token, and what is left is a prompt of the last one."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.recurrent.selective_scan.op import selective_scan
from graphllm.ops.recurrent.slots import Slots


@selective_scan.tuning_inputs
def tuning_step(x_TD: Tensor, A_DN: Tensor, at: Slots) -> dict[str, Tensor]:
    """Decays, and where sequences and their states are, on the device of the given tensors and of their shapes."""
    T, S, device = x_TD.shape[0], at.slots.shape[0], x_TD.device
    starts = torch.arange(S + 1, dtype=torch.int32, device=device).clamp(max=T)
    starts[S] = T
    return {
        "A_DN": torch.full_like(A_DN, -1.0),
        "query_start_loc": starts,
        "slots": torch.randperm(S, device=device).to(torch.int32),
        "state_versions": torch.zeros(S, dtype=torch.int32, device=device),
    }
