"""Jamba: layers of Mamba's mixer, with norms inside, and a few of attention, which knows no positions. Every few layers
have experts."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight, register_model
from graphllm.model_defs import llama
from graphllm.model_defs.common import (
    HF,
    MOST_LAYERS,
    check_plain,
    experts_per_token,
    head_dim,
    head_matrix,
    heads,
    only,
    single_experts,
    split_heads,
    token_table,
)
from graphllm.model_defs.mamba import MOST_STATES, MOST_TAPS, Mixer, mix, mixer_states, mixer_weights, rank
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.ops.norms.rms_norm import rms_norm

_SPARSE = "_sparse"


@dataclass(frozen=True)
class Config(Mixer):
    """H query heads, K key/value heads, E head dimension, F feed-forward width, V vocabulary; X experts of width
    F_expert, A of them for each token. Layer types are "attention" and "mamba"; one with experts ends with "_sparse".
    """

    H: int
    K: int
    E: int
    F: int
    V: int
    X: int
    A: int
    F_expert: int
    max_len: int
    layer_types: tuple[str, ...]
    eps: float
    tied: bool


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    only(hf, "hidden_act", "silu")
    only(hf, "sliding_window", None)
    only(hf, "mamba_inner_layernorms", True)  # older files say so
    D, F, X = whole(hf, "hidden_size", 4096), whole(hf, "intermediate_size", 14_336), whole(hf, "num_experts", 16)
    given = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": D} | dict(hf)
    H, K = heads(given)
    eps = number(hf, "rms_norm_eps", 1e-6, ge=0, le=1)
    return Config(
        D=D,
        M=whole(hf, "mamba_expand", 2) * D,
        N=whole(hf, "mamba_d_state", 16, le=MOST_STATES),
        R=rank(hf, "mamba_dt_rank", D),
        W=whole(hf, "mamba_d_conv", 4, ge=2, le=MOST_TAPS),
        bias=switch(hf, "mamba_proj_bias", False),
        conv_bias=switch(hf, "mamba_conv_bias", True),
        mixer_norms="weighted",
        mixer_eps=eps,
        H=H,
        K=K,
        E=head_dim(given),
        F=F,
        V=whole(hf, "vocab_size", 65_536),
        X=X,
        A=experts_per_token(hf, X, 2) if X > 1 else 0,
        F_expert=F,
        max_len=whole(hf, "max_position_embeddings", 262_144, le=MOST),
        layer_types=_layer_types(hf, X),
        eps=eps,
        tied=switch(hf, "tie_word_embeddings", False),
    )


def _layer_types(hf: HF, X: int) -> tuple[str, ...]:
    """Every few layers, from an offset on, have attention, and experts, of which there must be several."""

    def every(name: str, period: int, offset: int) -> tuple[int, int]:
        period = whole(hf, f"{name}_layer_period", period)
        offset = whole(hf, f"{name}_layer_offset", offset, ge=0)
        if offset >= period:
            raise ConfigError(
                f"config.json: {name}_layer_offset is {offset}; set it to the checkpoint's, below the period, {period}"
            )
        return period, offset

    (attention, first), (experts, first_experts) = every("attn", 8, 4), every("expert", 2, 1)
    return tuple(
        ("attention" if i % attention == first else "mamba")
        + (_SPARSE if X > 1 and i % experts == first_experts else "")
        for i in range(whole(hf, "num_hidden_layers", 32, le=MOST_LAYERS))
    )


def _is_attention(layer_type: str) -> bool:
    return layer_type.startswith("attention")


def embed_weights(c: Config) -> dict[str, Weight]:
    return {"tokens": token_table(c, "model.embed_tokens.weight")}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    attn, mlp, inner = llama.LAYER + "self_attn.", llama.LAYER + "feed_forward.", c.H * c.E
    weights = {
        "norm": Weight((c.D,), (llama.LAYER + "input_layernorm.weight",)),
        "ffn_norm": Weight((c.D,), (llama.LAYER + "pre_ff_layernorm.weight",)),
    }
    if _is_attention(layer_type):
        parts = (inner, c.K * c.E, c.K * c.E)
        weights["qkv"] = llama.merged("q k v", attn, parts, c.D, heads=(c.H, c.K, c.K))
        weights["o"] = Weight((c.D, inner), (attn + "o_proj.weight",), shard="input")
    else:
        weights |= mixer_weights(c, llama.LAYER + "mamba.")
    if not layer_type.endswith(_SPARSE):
        return weights | {
            "gate_up": llama.merged("gate up", mlp, (c.F, c.F), c.D),
            "down": Weight((c.D, c.F), (mlp + "down_proj.weight",), shard="input"),
        }

    return weights | {
        "router": Weight((c.X, c.D), (mlp + "router.weight",), exact=True),
        "gate_up": single_experts(mlp + "experts.", ("gate_proj", "up_proj"), c.X, c.F_expert, c.D, "output"),
        "down": single_experts(mlp + "experts.", ("down_proj",), c.X, c.D, c.F_expert, "input"),
    }


def head_weights(c: Config) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), ("model.final_layernorm.weight",)), "lm_head": head_matrix(c)}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return (kv_state(c.K, c.E),) if _is_attention(layer_type) else mixer_states(c)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return embedding(ctx.inputs.token_ids, w.tokens), ()


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.norm, c.eps)
    x_TD = x_TD + (_attend(c, w, h_TD, ctx) if _is_attention(layer_type) else mix(c, w, h_TD, ctx))
    h_TD = rms_norm(x_TD, w.ffn_norm, c.eps)
    if not layer_type.endswith(_SPARSE):
        return x_TD + llama.mlp(w, h_TD)
    weights_TA, experts_TA = moe_route(linear(h_TD, w.router), c.A, renormalize=False)
    return x_TD + fused_moe(h_TD, w.gate_up, w.down, weights_TA, experts_TA)


def _attend(c: Config, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    q_THE, k_TKE, v_TKE = split_heads(linear(h_TD, w.qkv), c.H, c.K, c.E)
    a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, scale=c.E**-0.5)
    return linear(a_THE.flatten(1), w.o)


GRAPH = Graph(
    lambda c: c.layer_types,
    embed_weights,
    layer_weights,
    head_weights,
    embed,
    layer,
    llama.head,
    states,
    norm=llama.norm,
)
MODEL = register_model(
    Model(
        architectures=("JambaForCausalLM",),
        config=from_hf,
        graphs=(GRAPH,),
        shardable=("M", "H", "K", "F", "F_expert"),
        shared=("K",),
        of_experts=("F_expert",),
    )
)
