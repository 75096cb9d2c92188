"""lm_head: logits of the rows that are sampled from."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(x_SD: Tensor, weight_VD: Tensor, softcap: float = 0.0) -> Cost:
    out = x_SD.shape[0] * weight_VD.shape[0]
    flops = 2 * x_SD.shape[1] + (3 if softcap else 0)
    return Cost(nbytes(x_SD, weight_VD) + out * x_SD.element_size(), flops * out)


@op(cost=_cost, rowwise=True)
def lm_head(x_SD: Tensor, weight_VD: Tensor, softcap: float = 0.0) -> Tensor:
    """x_SD [S, D] times weight_VD [V, D] transposed: logits [S, V] in x's dtype.

    softcap: if positive, logits become softcap * tanh(logits / softcap), every operation rounded to x's dtype.
    Products accumulate in float32 (float64 for float64 inputs). Source: Gemma 2 report 2024 (soft cap).
    """
    logits_SV = torch.nn.functional.linear(x_SD, weight_VD)
    return torch.tanh(logits_SV / softcap) * softcap if softcap > 0 else logits_SV


@lm_head.fake
def _(x_SD: Tensor, weight_VD: Tensor, softcap: float = 0.0) -> Tensor:
    return x_SD.new_empty((x_SD.shape[0], weight_VD.shape[0]))
