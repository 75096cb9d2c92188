"""rope_attention on the kernels of `paged_attention`, which turn queries and keys on the way in."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Site
from graphllm.ops.paged_attention.triton_decode import Turn, attends, decode_configs, is_decode
from graphllm.ops.paged_attention.triton_decode import triton_decode as decode
from graphllm.ops.paged_attention.triton_prefill import triton_prefill as prefill
from graphllm.ops.rope_attention.op import rope_attention


def _turns(site: Site) -> bool:
    tables = [site.args[name] for name in ("cos_TF", "sin_TF")]
    norms = [n for n in (site.args["q_norm_E"], site.args["k_norm_E"]) if n is not None]
    same = all(n.dtype == site.args["q_THE"].dtype for n in norms)
    return same and all(t.dtype == torch.float32 and t.is_contiguous() for t in tables)


@rope_attention.impl(
    "triton_decode", device="cuda", supports=lambda s: is_decode(s) and _turns(s), configs=decode_configs
)
def triton_decode(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    scale: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    q_norm_E: Tensor | None = None,
    k_norm_E: Tensor | None = None,
    eps: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    **config: int,
) -> Tensor:
    """Pure decode: every sequence has zero or one query token."""
    turn = Turn(cos_TF, sin_TF, q_norm_E, k_norm_E, eps)
    return decode(
        q_THE, k_TKE, v_TKE, kv_cache, block_table, query_start, seq_len, scale, window, softcap, turn, **config
    )


@rope_attention.impl("triton_prefill", device="cuda", supports=lambda s: attends(s) and _turns(s))
def triton_prefill(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    scale: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    q_norm_E: Tensor | None = None,
    k_norm_E: Tensor | None = None,
    eps: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Any ragged batch."""
    turn = Turn(cos_TF, sin_TF, q_norm_E, k_norm_E, eps)
    return prefill(q_THE, k_TKE, v_TKE, kv_cache, block_table, query_start, seq_len, scale, window, softcap, turn)
