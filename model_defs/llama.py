"""Llama and its close relatives: Mistral and Ministral (sliding windows), Qwen2 (bias on q, k, v), Qwen3 (q and k
normalized)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, strings, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs.common import (
    HF,
    LARGEST_HEAD,
    MOST_LAYERS,
    check_plain,
    head_dim,
    head_matrix,
    heads,
    layer_types_of,
    only,
    split_heads,
    token_table,
)
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.attention.encoder_attention import encoder_attention
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table import Rope
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

# What the files of each architecture leave out; Llama's own are the readers' defaults below.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "MinistralForCausalLM": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}

LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Sizes:
    """D width, H query heads, K key/value heads, E head dimension, F feed-forward width, V vocabulary."""

    D: int
    H: int
    K: int
    E: int
    F: int
    V: int
    max_len: int
    layer_types: tuple[str, ...]  # "full" or, with a sliding window, "sliding"
    window: int
    eps: float
    scale: float


@dataclass(frozen=True)
class Config(Sizes):
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "row"] = ""  # whether q and k are normalized: each head, or all of a row together
    causal: bool = True  # False, in some embedders: tokens see later tokens too, and there is no cache


def from_hf(hf: HF, like: str = "", partly: bool = False) -> Config:
    """The config of any of the family's ``config.json``. like: the architecture that sets defaults and supported
    fields, for a relative of it; default: the file's own. partly: whether heads may be rotated in part. Raises
    ConfigError for settings that are not supported."""
    architecture = f"{like}ForCausalLM" if like else hf["architectures"][0]
    hf = _DEFAULTS.get(architecture, _DEFAULTS["LlamaForCausalLM"]) | dict(hf)  # a package may call it otherwise
    check_plain(hf)
    only(hf, "hidden_act", "silu")
    mistral = architecture in ("MistralForCausalLM", "MinistralForCausalLM")
    qwen2, qwen3 = (architecture == f"{name}ForCausalLM" for name in ("Qwen2", "Qwen3"))
    llama = not (mistral or qwen2 or qwen3)
    (H, K), L = heads(hf), whole(hf, "num_hidden_layers", le=MOST_LAYERS)
    E = whole(hf, "head_dim", le=LARGEST_HEAD) if qwen3 else head_dim(hf)
    rope_settings = Rope.from_hf(hf, E, partly=partly)
    bias = (llama or qwen3) and switch(hf, "attention_bias", False)
    window = 0 if llama else whole(hf, "sliding_window", null=0, le=MOST)
    if not mistral and not switch(hf, "use_sliding_window", False):
        window = 0
    return Config(
        D=whole(hf, "hidden_size"),
        H=H,
        K=K,
        E=E,
        F=whole(hf, "intermediate_size"),
        V=whole(hf, "vocab_size"),
        max_len=max(whole(hf, "max_position_embeddings", le=MOST), rope_settings.max_len),
        layer_types=_layer_types(hf, L, window, mistral, llama),
        window=window,
        eps=number(hf, "rms_norm_eps", 1e-6, ge=0, le=1),
        scale=E**-0.5,
        rope=rope_settings,
        tied=switch(hf, "tie_word_embeddings", False),
        qkv_bias=bias or qwen2,
        o_bias=bias,
        mlp_bias=llama and switch(hf, "mlp_bias", False),
        qk_norm="head" if qwen3 else "",
    )


def _layer_types(hf: HF, L: int, window: int, mistral: bool, llama: bool) -> tuple[str, ...]:
    """Mistral's window is on in the layers that ``layer_types`` says, else in all, as transformers' AutoModel has it;
    Qwen's in some layers when ``use_sliding_window``."""
    if not llama and (types := strings(hf, "layer_types")):
        found = layer_types_of(types, L)
        if "sliding" in found and not window:
            needed = "sliding_window" if mistral else "use_sliding_window and sliding_window"
            raise ConfigError(f"config.json: layer_types has sliding_attention without a window; set {needed}")
        return found
    if mistral or llama:
        return ("sliding" if window else "full",) * L
    first = whole(hf, "max_window_layers", 28, ge=0)
    return tuple("sliding" if window and i >= first else "full" for i in range(L))


def embed_weights(c: Config) -> dict[str, Weight]:
    return {"tokens": token_table(c, "model.embed_tokens.weight"), "inv_freq": c.rope.weight()}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    mlp = LAYER + "mlp."
    weights = attention_weights(c) | mlp_weights(mlp, c.F, c.D)
    if c.mlp_bias:
        weights["gate_up_bias"] = merged("gate up", mlp, (c.F, c.F))
        weights["down_bias"] = Weight((c.D,), (mlp + "down_proj.bias",))
    return weights


def mlp_weights(of: str, F: int, D: int) -> dict[str, Weight]:
    """The matrices of a dense feed-forward part of width F. of: what their names begin with."""
    return {
        "gate_up": merged("gate up", of, (F, F), D),
        "down": Weight((D, F), (of + "down_proj.weight",), shard="input"),
    }


def attention_weights(c: Config) -> dict[str, Weight]:
    """The weights of a layer's attention and its two norms."""
    attn, parts, heads = LAYER + "self_attn.", (c.H * c.E, c.K * c.E, c.K * c.E), (c.H, c.K, c.K)
    weights = {
        "attn_norm": Weight((c.D,), (LAYER + "input_layernorm.weight",)),
        "qkv": merged("q k v", attn, parts, c.D, heads=heads),
        "o": Weight((c.D, c.H * c.E), (attn + "o_proj.weight",), shard="input"),
        "ffn_norm": Weight((c.D,), (LAYER + "post_attention_layernorm.weight",)),
    }
    if c.qkv_bias:
        weights["qkv_bias"] = merged("q k v", attn, parts, heads=heads)
    if c.o_bias:
        weights["o_bias"] = Weight((c.D,), (attn + "o_proj.bias",))
    if c.qk_norm:
        widths = (c.H * c.E, c.K * c.E) if c.qk_norm == "row" else (c.E, c.E)
        for name, width, count in zip("qk", widths, heads, strict=False):
            divided: dict[str, Any] = {"shard": "output", "heads": (count,)} if c.qk_norm == "row" else {}
            weights[f"{name}_norm"] = Weight((width,), (f"{attn}{name}_norm.weight",), **divided)
    return weights


def merged(names: str, of: str, segments: tuple[int, ...], *width: int, heads: tuple[int, ...] = ()) -> Weight:
    """Projections of the same rows as one: their matrices, or without a width their biases. heads: of each."""
    leaf = "weight" if width else "bias"
    sources = tuple(f"{of}{name}_proj.{leaf}" for name in names.split())
    return Weight((sum(segments), *width), sources, segments, shard="output", heads=heads)


def head_weights(c: Config) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), ("model.norm.weight",)), "lm_head": head_matrix(c)}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return (kv_state(c.K, c.E, c.window if layer_type == "sliding" else 0),) if c.causal else ()


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext, scale: float = 1.0) -> tuple[Tensor, tuple[Tensor, ...]]:
    angles = c.rope.table(ctx.inputs.positions, w.inv_freq)
    return embedding(ctx.inputs.token_ids, w.tokens, scale), angles


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return feed_forward(c, w, x_TD + attend(c, layer_type, w, rms_norm(x_TD, w.attn_norm, c.eps), ctx))


def feed_forward(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    """The part of a layer that follows its attention, with its norm."""
    return x_TD + mlp(w, rms_norm(x_TD, w.ffn_norm, c.eps))


def mlp(w: SimpleNamespace, h_TD: Tensor) -> Tensor:
    """The dense feed-forward part, from normalized rows to what is added to the stream."""
    gate_up_T2F = linear(h_TD, w.gate_up, getattr(w, "gate_up_bias", None))
    return linear(swiglu(gate_up_T2F), w.down, getattr(w, "down_bias", None))


def attend(c: Config, layer_type: str, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """The attention of a layer, from normalized rows to what is added to the stream."""
    q_THE, k_TKE, v_TKE = split_heads(linear(h_TD, w.qkv, getattr(w, "qkv_bias", None)), c.H, c.K, c.E)
    if c.qk_norm == "row":
        q_THE = rms_norm(q_THE.flatten(1), w.q_norm, c.eps).unflatten(1, (c.H, c.E))
        k_TKE = rms_norm(k_TKE.flatten(1), w.k_norm, c.eps).unflatten(1, (c.K, c.E))
    elif c.qk_norm:
        q_THE, k_TKE = rms_norm(q_THE, w.q_norm, c.eps), rms_norm(k_TKE, w.k_norm, c.eps)
    if ctx.shared:  # else attention knows no positions
        q_THE, k_TKE = rope(q_THE, *ctx.shared), rope(k_TKE, *ctx.shared)
    window = c.window if layer_type == "sliding" else 0
    if not c.causal:
        a_THE = encoder_attention(q_THE, k_TKE, v_TKE, ctx.inputs.query_start_loc, c.scale)
        return linear(a_THE.flatten(1), w.o, getattr(w, "o_bias", None))
    sinks_H = getattr(w, "sinks", None)
    a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, scale=c.scale, window=window, sinks_H=sinks_H)
    return linear(a_THE.flatten(1), w.o, getattr(w, "o_bias", None))


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, w.norm, c.eps)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return linear(norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices)), w.lm_head)


GRAPH = Graph(
    lambda c: c.layer_types, embed_weights, layer_weights, head_weights, embed, layer, head, states, norm=norm
)
MODEL = register_model(
    Model(architectures=tuple(_DEFAULTS), config=from_hf, graphs=(GRAPH,), shardable=("H", "K", "F"), shared=("K",))
)
