"""GLM-4.5 and 4.6 (MoE) with Llama's attention, dots.llm1 with Qwen3's, both with DeepSeek's experts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.config.fields import switch
from graphllm.ir import ForwardContext, Weight, register_model
from graphllm.model_defs import deepseek_moe, llama, moe
from graphllm.model_defs.common import HF, extended, head_dim
from graphllm.ops.norms.rms_norm import rms_norm

_DOTS = "Dots1ForCausalLM"
# What files leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1,
    },
    _DOTS: {"max_position_embeddings": 2048, "max_window_layers": 62, "norm_topk_prob": False},
}  # fmt: skip


def from_hf(hf: HF) -> deepseek_moe.Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    architecture = hf["architectures"][0]
    hf = _DEFAULTS[architecture] | dict(hf)
    if architecture == _DOTS:
        dense = llama.from_hf({**hf, "head_dim": head_dim(hf), "use_sliding_window": True}, "Qwen3")
    else:
        dense = llama.from_hf(hf, "Llama", partly=True)
        dense = replace(dense, o_bias=False, qk_norm="head" if switch(hf, "use_qk_norm", False) else "")
    types = deepseek_moe.layer_types(dense.layer_types, hf)
    return extended(deepseek_moe.Config, dense, **deepseek_moe.routing(hf) | {"layer_types": types})


def layer_weights(c: deepseek_moe.Config, layer_type: str) -> dict[str, Weight]:
    return llama.attention_weights(c) | deepseek_moe.weights(c, layer_type)


def layer(c: deepseek_moe.Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.attn_norm, c.eps)
    x_TD = x_TD + llama.attend(c, moe.attention_type(layer_type), w, h_TD, ctx)
    return deepseek_moe.feed_forward(c, layer_type, w, x_TD)


MODEL = register_model(
    replace(
        moe.MODEL,
        architectures=tuple(_DEFAULTS),
        config=from_hf,
        graphs=(replace(moe.GRAPH, layer_weights=layer_weights, layer=layer),),
    )
)
