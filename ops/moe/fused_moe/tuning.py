"""A step to tune fused_moe on: every token chooses at random, as a trained router nearly does over many tokens, and has
one adapter after the other, if there are any."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.lora.add_lora.tuning import every_adapter
from graphllm.ops.moe.fused_moe.op import fused_moe


@fused_moe.tuning_inputs
def even_routing(
    weights_TA: Tensor,
    experts_TA: Tensor,
    down_NDF: Tensor,
    adapter_ids_T: Tensor | None,
    down_lora_a_LNrF: Tensor | None,
) -> dict[str, Tensor]:
    """Experts of each token and their weights, and adapters, on the device of the given tensors and of their shapes."""
    (T, A), N, device = experts_TA.shape, down_NDF.shape[0], down_NDF.device
    chosen = torch.rand((T, N), device=device).topk(A, -1).indices.to(torch.int32)
    weights = torch.softmax(torch.randn_like(weights_TA), -1)
    return {"experts_TA": chosen, "weights_TA": weights, **every_adapter(adapter_ids_T, down_lora_a_LNrF)}
