"""store_rows: what a graph that runs later in the same step reads of this one."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


@op(cost=lambda rows: Cost(2 * nbytes(rows), 0), mutates=("state",))
def store_rows(rows: Tensor, state: Tensor) -> None:
    """Write rows [T] or [T, D] to the first T rows of state [N, ...], N >= T, in its dtype."""
    state.index_put_((torch.arange(rows.shape[0], device=rows.device),), rows.to(state.dtype))
