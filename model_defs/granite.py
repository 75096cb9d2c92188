"""Granite and Granite-MoE: Llama's layers with numbers that scale the embedding, attention, every addition to the
stream, and the logits; the second with experts, stored stacked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config.fields import number, whole
from graphllm.ir import ForwardContext, Weight, register_model
from graphllm.model_defs import llama
from graphllm.model_defs.common import HF, check_plain, extended
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.ops.norms.rms_norm import rms_norm


@dataclass(frozen=True)
class Config(llama.Config):
    """N experts, A of them for each token; without any, a dense layer."""

    N: int = 0
    A: int = 0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    experts = hf["architectures"][0] == "GraniteMoeForCausalLM"
    return extended(
        Config,
        llama.from_hf(hf, "Llama"),
        scale=number(hf, "attention_multiplier", 1.0),
        N=whole(hf, "num_local_experts") if experts else 0,
        A=whole(hf, "num_experts_per_tok") if experts else 0,
        embed_scale=number(hf, "embedding_multiplier", 1.0),
        residual_scale=number(hf, "residual_multiplier", 1.0),
        logits_divisor=number(hf, "logits_scaling", 1.0),
    )


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    if not c.N:
        return llama.layer_weights(c, layer_type)
    return llama.attention_weights(c) | expert_weights(c)


def expert_weights(c: Config) -> dict[str, Weight]:
    moe = llama.LAYER + "block_sparse_moe."
    return {
        "router": Weight((c.N, c.D), (moe + "router.layer.weight",), exact=True),
        "gate_up": Weight(
            (c.N, 2 * c.F, c.D), (moe + "input_linear.weight",), (c.F,) * (2 * c.N), shard="output", expert_axis=0
        ),
        "down": Weight((c.N, c.D, c.F), (moe + "output_linear.weight",), shard="input", expert_axis=0),
    }


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return llama.embed(c, w, ctx, c.embed_scale)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    x_TD = x_TD + c.residual_scale * llama.attend(c, layer_type, w, rms_norm(x_TD, w.attn_norm, c.eps), ctx)
    h_TD = rms_norm(x_TD, w.ffn_norm, c.eps)
    out_TD = experts(c, w, h_TD) if c.N else llama.mlp(w, h_TD)
    return x_TD + c.residual_scale * out_TD


def experts(c: Config, w: SimpleNamespace, h_TD: Tensor) -> Tensor:
    return fused_moe(h_TD, w.gate_up, w.down, *moe_route(linear(h_TD, w.router), c.A))


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return llama.head(c, w, x_TD, ctx) / c.logits_divisor


register_model(
    replace(
        llama.MODEL,
        architectures=("GraniteForCausalLM", "GraniteMoeForCausalLM"),
        config=from_hf,
        graphs=(replace(llama.GRAPH, layer_weights=layer_weights, embed=embed, layer=layer, head=head),),
        of_experts=("F",),
    )
)
