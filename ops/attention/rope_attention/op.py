"""rope_attention: norm and rotation of queries and keys, the cache write and attention, from the projection's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.norms.rms_norm import rms_norm


def _cost(
    q_THE: Tensor, k_TKE: Tensor, cos_TF: Tensor, sin_TF: Tensor, q_norm_E: Tensor | None, k_norm_E: Tensor | None,
    **others: Any,
) -> Cost:  # fmt: skip
    inner = paged_attention.cost(q_THE=q_THE, k_TKE=k_TKE, **others)
    rotated = q_THE.numel() + k_TKE.numel()
    read = nbytes(cos_TF, sin_TF, q_norm_E, k_norm_E)
    return Cost(inner.bytes + read, inner.flops + rotated * (6 if q_norm_E is None else 10))


@op(boundary=True, mutates=("kv_cache",), cost=_cost)
def rope_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    q_norm_E: Tensor | None = None,
    k_norm_E: Tensor | None = None,
    eps: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    kv_scales: Tensor | None = None,
    ancestors_T: Tensor | None = None,
) -> Tensor:
    """`paged_attention` of queries and keys that are first normalized and rotated: [T, H, E] in q's dtype.

    cos_TF, sin_TF: tables of `rope`. q_norm_E, k_norm_E [E]: both or none; weights of `rms_norm` over each head, with
    ``eps`` and offset 0, before the rotation. The other arguments are those of `paged_attention`. An implementation may
    keep float32 within the rotation; the reference rounds to q's dtype after each product.
    """
    if q_norm_E is not None and k_norm_E is not None:
        q_THE, k_TKE = rms_norm.reference(q_THE, q_norm_E, eps), rms_norm.reference(k_TKE, k_norm_E, eps)
    return paged_attention.reference(
        rope.reference(q_THE, cos_TF, sin_TF),
        rope.reference(k_TKE, cos_TF, sin_TF),
        *(v_TKE, kv_cache, block_table, query_start_loc, seq_lens, scale, window, softcap, sinks_H, kv_scales),
        ancestors_T,
    )


@rope_attention.fake
def _(q_THE: Tensor) -> Tensor:
    return torch.empty_like(q_THE, memory_format=torch.contiguous_format)
