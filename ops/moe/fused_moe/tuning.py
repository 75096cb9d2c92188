"""A step to tune fused_moe on: every token chooses at random, as a trained router nearly does over many tokens, and has
one adapter after the other, if there are any."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ops.lora.add_lora.tuning import every_adapter
from graphllm.ops.moe.fused_moe.op import fused_moe
from graphllm.ops.moe.fused_moe.operands import ExpertLora, Experts, Route


@fused_moe.tuning_inputs
def even_routing(experts: Experts, route: Route, lora: ExpertLora | None) -> dict[str, Tensor]:
    """Experts of each token and their weights, and adapters, on the device of the given tensors and of their shapes."""
    (T, A), N, device = route.experts_TA.shape, experts.sizes[0], route.experts_TA.device
    chosen = torch.rand((T, N), device=device).topk(A, -1).indices.to(torch.int32)
    weights = torch.softmax(torch.randn_like(route.weights_TA), -1)
    return {
        "experts_TA": chosen,
        "weights_TA": weights,
        **(every_adapter(lora.adapter_ids_T, lora.down_lora_a_LNrF) if lora else {}),
    }
