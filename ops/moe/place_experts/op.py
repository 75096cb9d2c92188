"""place_experts: which slot of this rank computes an expert, where experts have copies on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(experts_TA: Tensor, starts_M: Tensor, slots_P: Tensor) -> Cost:
    return Cost(2 * nbytes(experts_TA) + nbytes(starts_M, slots_P), 8 * experts_TA.numel())


@op(cost=_cost)
def place_experts(experts_TA: Tensor, starts_M: Tensor, slots_P: Tensor, first: Tensor, count: int) -> Tensor:
    """The slots of the experts that each token has chosen, less the rank's first one; -1 for those that another rank
    computes. [T, A] int32.

    experts_TA [T, A] int32. starts_M [N + 1] int32: the slots of expert n are slots_P[starts_M[n] : starts_M[n + 1]],
    one at least. slots_P [P] int32: the slots of all ranks, each once. first [1] int32: of the rank, which has
    ``count``. Of an expert's c copies a token takes the one of its index in the step modulo c, so copies share the
    tokens evenly, and all ranks agree. Source: DeepSeek-AI 2024, V3 (redundant experts).
    """
    experts = experts_TA.long()
    begin_TA = starts_M[experts]
    # Inductor's C++ divides in lanes after the last entry as well, where everything is zero.
    copies_TA = (starts_M[experts + 1] - begin_TA).clamp(min=1)
    index_T1 = torch.arange(experts.shape[0], device=experts.device, dtype=torch.int32).unsqueeze(1)
    local_TA = slots_P[(begin_TA + index_T1 % copies_TA).long()] - first
    return torch.where((local_TA >= 0) & (local_TA < count), local_TA, -1)
