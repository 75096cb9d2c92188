"""Phi-3.5-MoE: Llama's attention between LayerNorms, and two experts a token that are chosen one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config.fields import number, section, switch
from graphllm.ir import ForwardContext, Weight, register_model, select_rows
from graphllm.model_defs import llama, moe
from graphllm.model_defs.common import HF, extended
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.ops.norms.layer_norm import layer_norm


@dataclass(frozen=True)
class Config(moe.Config):
    jitter: float = 0.01
    head_bias: bool = False


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    inner = moe.from_hf(hf, "Mixtral")
    scaling = section(hf, "rope_parameters") or section(hf, "rope_scaling")
    scale = number(scaling, "long_mscale" if inner.rope.long else "short_mscale", inner.rope.scale, inner.rope.scale)
    bias = switch(hf, "attention_bias", False)
    return extended(
        Config,
        inner,
        rope=replace(inner.rope, scale=scale),
        qkv_bias=bias,
        o_bias=bias,
        jitter=number(hf, "router_jitter_noise", 0.01),
        head_bias=switch(hf, "lm_head_bias", False),
    )


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    return moe.layer_weights(c, layer_type) | {
        "attn_norm_bias": Weight((c.D,), (llama.LAYER + "input_layernorm.bias",)),
        "ffn_norm_bias": Weight((c.D,), (llama.LAYER + "post_attention_layernorm.bias",)),
    }


def head_weights(c: Config) -> dict[str, Weight]:
    biases = {"norm_bias": Weight((c.D,), ("model.norm.bias",))}
    if c.head_bias:
        biases["lm_head_bias"] = Weight((c.V,), ("lm_head.bias",), shard="vocab")
    return llama.head_weights(c) | biases


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = layer_norm(x_TD, w.attn_norm, w.attn_norm_bias, c.eps)
    x_TD = x_TD + llama.attend(c, moe.attention_type(layer_type), w, h_TD, ctx)
    h_TD = layer_norm(x_TD, w.ffn_norm, w.ffn_norm_bias, c.eps)
    route = moe_route(linear(h_TD, w.router), c.A, scoring="sparsemixer", jitter=c.jitter)
    return x_TD + fused_moe(h_TD, w.gate_up, w.down, *route)


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return layer_norm(x_TD, w.norm, w.norm_bias, c.eps)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_RD = norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices))
    return linear(h_RD, w.lm_head, getattr(w, "lm_head_bias", None))


register_model(
    replace(
        moe.MODEL,
        architectures=("PhimoeForCausalLM",),
        config=from_hf,
        graphs=(
            replace(
                moe.GRAPH, layer_weights=layer_weights, head_weights=head_weights, layer=layer, head=head, norm=norm
            ),
        ),
        shardable=("H", "K", "F_expert"),
    )
)
