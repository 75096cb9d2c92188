"""rope_table: the angles of rotary position embedding, once a step."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(positions_T: Tensor, inv_freq_F: Tensor) -> Cost:
    angles = positions_T.numel() * inv_freq_F.shape[0]
    return Cost(nbytes(positions_T, inv_freq_F) + 2 * angles * inv_freq_F.element_size(), 40 * angles)


@op(cost=_cost)
def rope_table(positions_T: Tensor, inv_freq_F: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's rotary angles, times scale: two tensors [T, F] in inv_freq's dtype.

    positions_T [T] int32: the token's position in its sequence. inv_freq_F [F] float32: radians per position for half
    the rotary dimensions. scale: the attention factor of YaRN and LongRoPE. Angles are float32 products, as in the
    checkpoints' training. Source: Su et al. 2021; Peng et al. 2023 (YaRN); Ding et al. 2024 (LongRoPE).
    """
    angle_TF = positions_T.to(inv_freq_F.dtype)[:, None] * inv_freq_F
    return angle_TF.cos() * scale, angle_TF.sin() * scale


@rope_table.fake(traceable=True)
def _(positions_T: Tensor, inv_freq_F: Tensor) -> tuple[Tensor, Tensor]:
    table_TF = inv_freq_F.new_empty(positions_T.shape[0], inv_freq_F.shape[0])
    return table_TF, torch.empty_like(table_TF)
