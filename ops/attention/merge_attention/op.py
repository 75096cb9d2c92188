"""merge_attention: one result of attention to several sets of keys, from the results to each set."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op


def _cost(out_PTHV: Tensor, lse_PTH: Tensor) -> Cost:
    P = max(1, out_PTHV.shape[0])
    return Cost((nbytes(out_PTHV, lse_PTH) * (P + 1)) // P, 2 * out_PTHV.numel() + 4 * lse_PTH.numel())


@op(cost=_cost)
def merge_attention(out_PTHV: Tensor, lse_PTH: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to P sets of keys together, from that to each set.

    out_PTHV: results of T rows and H heads for each set, [P, T, H, V].
    lse_PTH: the natural logarithm of the sum of exp(score) over the set's keys, float32 [P, T, H]. -inf: the row saw no
        key of the set; its result there may be anything.
    Returns the result, [T, H, V] in out_PTHV's dtype, zeros where a row saw no key at all, and its log-sum-exp, float32
    [T, H]. All is computed in float32. Source: Dao et al. 2022, FlashAttention, section 3.1.
    """
    exact = torch.promote_types(out_PTHV.dtype, torch.float32)
    lse_TH = torch.logsumexp(lse_PTH.to(exact), 0)
    shares_PTH = torch.exp(lse_PTH.to(exact) - torch.where(lse_TH == float("-inf"), 0, lse_TH))
    parts_PTHV = torch.where(shares_PTH[..., None] > 0, out_PTHV.to(exact) * shares_PTH[..., None], 0)
    return parts_PTHV.sum(0).to(out_PTHV.dtype), lse_TH.to(lse_PTH.dtype)
