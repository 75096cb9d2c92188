"""A step to tune latent attention on: that of paged attention, over latents as they are in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.attention.latent_attention.op import latent_attention, store
from graphllm.ops.attention.paged_attention.tuning import tuning_batch


@latent_attention.tuning_inputs
def tuning_step(
    q_nope_THN: Tensor, latent_TL: Tensor, k_rope_TR: Tensor, latent_cache: Tensor, block_table: Tensor
) -> dict[str, Tensor]:
    """The cache, with other blocks than the given one, and what says where sequences are in it."""
    _, P, C = latent_cache.shape
    blocks, where = tuning_batch(block_table, len(q_nope_THN), P)
    cache = latent_cache.new_zeros(blocks, P, C)
    token = torch.arange(blocks * P, device=cache.device)
    drawn = (latent_TL.new_empty(len(token), t.shape[1]).normal_() for t in (latent_TL, k_rope_TR))
    store(cache, token // P, token % P, *drawn)
    return {"latent_cache": cache, **where}
