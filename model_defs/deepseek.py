"""DeepSeek-V2, V3 and R1, Kimi-K2, and relatives: attention over latents, then experts or a dense part.

GLM-4.7-Flash (glm4_moe_lite) has other sizes, Youtu no experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.config.fields import raw, switch
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import deepseek_moe, llama, mla, moe
from graphllm.model_defs.common import HF, extended, only
from graphllm.ops.norms.rms_norm import rms_norm

_V2 = "DeepseekV2ForCausalLM"
# What files leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    _V2: {"n_shared_experts": 2, "n_routed_experts": 64},
    "DeepseekV3ForCausalLM": {
        "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_shared_experts": 1, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    },
    "Glm4MoeLiteForCausalLM": {
        "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
    },
    "YoutuForCausalLM": {"max_position_embeddings": 131_072, "tie_word_embeddings": True},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_moe.Config):
    """H, K and E are those of mla; layer types end with "_sparse" where there are experts."""

    mla: mla.Attention


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    architecture = hf["architectures"][0]
    hf = _DEFAULTS[architecture] | dict(hf)
    v2 = architecture == _V2
    attention = mla.from_hf(hf, interleaved=v2 or switch(hf, "rope_interleave", True))
    dense = llama.from_hf({**hf, "head_dim": attention.R}, "Llama")
    only(hf, "mlp_bias", False)
    if raw(hf, "n_routed_experts") is None:
        return extended(Config, dense, mla=attention)
    types = deepseek_moe.layer_types(dense.layer_types, hf)
    return extended(Config, dense, mla=attention, **deepseek_moe.routing(hf, not v2) | {"layer_types": types})


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    return mla.weights(c.mla) | deepseek_moe.weights(c, layer_type)


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return mla.states(c.mla)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    x_TD = x_TD + mla.attend(c.mla, w, rms_norm(x_TD, w.attn_norm, c.eps), ctx)
    return deepseek_moe.feed_forward(c, layer_type, w, x_TD)


GRAPH = replace(moe.GRAPH, layer_weights=layer_weights, layer=layer, states=states)
MODEL = register_model(
    replace(
        moe.MODEL,
        architectures=tuple(_DEFAULTS),
        config=from_hf,
        graphs=(GRAPH,),
        shardable=(*mla.SHARDABLE, "F", "F_expert", "F_shared"),
    )
)
