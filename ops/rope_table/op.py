"""rope_table: the angles of rotary position embedding, once a step."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(positions_T: Tensor, context_len_T: Tensor, inv_freq_RF: Tensor, original_len: int) -> Cost:
    angles = positions_T.numel() * inv_freq_RF.shape[1]
    read = nbytes(positions_T, inv_freq_RF) + (nbytes(context_len_T) if original_len else 0)
    return Cost(read + 2 * angles * inv_freq_RF.element_size(), 40 * angles)


@op(cost=_cost)
def rope_table(
    positions_T: Tensor,
    context_len_T: Tensor,
    inv_freq_RF: Tensor,
    original_len: int = 0,
    ntk_factor: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's rotary angles, times scale: two tensors [T, F] in inv_freq's dtype.

    positions_T [T] int32: the token's position in its sequence. context_len_T [T] int32: the known length of its
    sequence; read only when the frequencies depend on length. inv_freq_RF [R, F] float32, radians per position for half
    the rotary dimensions; with R = 2 a token takes row 1 when its context is longer than original_len (LongRoPE), else
    row 0. ntk_factor: if positive, the base grows with contexts beyond original_len: frequency f of F is multiplied by
    s^(-f / (F - 1)) with s = ntk_factor * context / original_len - (ntk_factor - 1) (dynamic NTK). scale: the
    attention factor of YaRN and LongRoPE. Angles are float32 products, as in the checkpoints' training.
    Source: Su et al. 2021; Peng et al. 2023 (YaRN, dynamic NTK); Ding et al. 2024 (LongRoPE).
    """
    freq_TF = inv_freq_RF[:1]
    if inv_freq_RF.shape[0] == 2:
        freq_TF = torch.where((context_len_T > original_len)[:, None], inv_freq_RF[1:], inv_freq_RF[:1])
    if ntk_factor > 0:
        F = inv_freq_RF.shape[1]
        length_T = context_len_T.clamp(min=original_len).to(inv_freq_RF.dtype)
        growth_T = length_T * (ntk_factor / original_len) - (ntk_factor - 1)
        exponent_F = torch.arange(F, device=inv_freq_RF.device, dtype=inv_freq_RF.dtype) / -max(F - 1, 1)
        freq_TF = freq_TF * torch.pow(growth_T[:, None], exponent_F)
    angle_TF = positions_T.to(inv_freq_RF.dtype)[:, None] * freq_TF
    return angle_TF.cos() * scale, angle_TF.sin() * scale


@rope_table.fake(traceable=True)
def _(positions_T: Tensor, inv_freq_RF: Tensor) -> tuple[Tensor, Tensor]:
    table_TF = inv_freq_RF.new_empty(positions_T.shape[0], inv_freq_RF.shape[1])
    return table_TF, torch.empty_like(table_TF)
