"""Nomic-BERT: a BERT with rotary positions and gated feed-forward layers; only its norms have biases. Its config.json
has two forms: its authors' own, and transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config.fields import MOST, number, whole
from graphllm.ir import ForwardContext, Weight, register_model
from graphllm.model_defs import bert
from graphllm.model_defs.common import HF, MOST_LAYERS, Sources, only, split_heads, widths, with_bias
from graphllm.model_defs.pooling import Pooling
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.attention.encoder_attention import encoder_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table import Rope
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm


@dataclass(frozen=True)
class Config(bert.Sizes):
    types: int  # token types, 0 without
    eps: float
    scale: float
    rope: Rope
    pooling: Pooling


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    authors = "n_embd" in hf
    if authors:
        for name, accepted in (
            ("activation_function", "swiglu"), ("prenorm", False), ("qkv_proj_bias", False), ("mlp_fc1_bias", False),
            ("mlp_fc2_bias", False), ("use_rms_norm", False), ("rotary_emb_fraction", 1.0), ("causal", False),
            ("rotary_emb_interleaved", False), ("rotary_emb_scale_base", None),
        ):  # fmt: skip
            if name in hf:
                only({name: float(hf[name])} if isinstance(accepted, float) else hf, name, accepted)
    only(hf, "hidden_act", "silu")
    names = ("n_embd", "n_head") if authors else ("hidden_size", "num_attention_heads")
    D, H, E = widths(hf, *names)
    theta = number(hf, "rotary_emb_base", 1000.0, gt=0)
    most = ("max_trained_positions" if "max_trained_positions" in hf else "n_positions") if authors else ""
    max_len = whole(hf, most or "max_position_embeddings", 2048, le=MOST)
    plain = {"rope_theta": theta, "max_position_embeddings": max_len}
    return Config(
        D=D,
        H=H,
        E=E,
        F=whole(hf, "n_inner" if authors else "intermediate_size", 3072, 4 * D),
        V=whole(hf, "vocab_size", 30528),
        L=whole(hf, "n_layer" if authors else "num_hidden_layers", 12, le=MOST_LAYERS),
        max_len=max_len,
        types=whole(hf, "type_vocab_size", 2, ge=0),
        eps=number(hf, "layer_norm_epsilon" if authors else "layer_norm_eps", 1e-12, ge=0, le=1),
        scale=E**-0.5,
        rope=Rope.from_hf(plain if authors else {"max_position_embeddings": max_len, **hf}, E, theta=theta),
        pooling=Pooling.from_hf(hf, "MEAN"),
    )


def _named(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((name, "bert." + name, "model." + name) for name in names)


def _of(name: str) -> Callable[[str], Sources]:
    return lambda leaf: _named(f"{name}.{leaf}")


def embed_weights(c: Config) -> dict[str, Weight]:
    types = {"types": Weight((c.types, c.D), _named("embeddings.token_type_embeddings.weight"))} if c.types else {}
    return {
        "tokens": Weight((c.V, c.D), _named("embeddings.word_embeddings.weight"), shard="vocab"),
        **types,
        **with_bias("norm", (c.D,), _of("emb_ln")),
        "inv_freq": c.rope.weight(),
    }


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    hf, inner = "encoder.layers.{layer}.", c.H * c.E
    parts = (inner,) * 3
    return {
        "qkv": Weight((3 * inner, c.D), _named(hf + "attn.Wqkv.weight"), parts, shard="output"),
        "o": Weight((c.D, inner), _named(hf + "attn.out_proj.weight"), shard="input"),
        **with_bias("attn_norm", (c.D,), _of(hf + "norm1")),
        "gate_up": Weight(
            (2 * c.F, c.D), _named(hf + "mlp.fc12.weight", hf + "mlp.fc11.weight"), (c.F, c.F), shard="output"
        ),
        "down": Weight((c.D, c.F), _named(hf + "mlp.fc2.weight"), shard="input"),
        **with_bias("ffn_norm", (c.D,), _of(hf + "norm2")),
    }


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    x_TD = bert.add_token_types(c, w, embedding(ctx.inputs.token_ids, w.tokens), ctx)
    angles = c.rope.table(ctx.inputs.positions, w.inv_freq)
    return layer_norm(x_TD, w.norm, w.norm_bias, c.eps), angles


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    q_THE, k_THE, v_THE = split_heads(linear(x_TD, w.qkv), c.H, c.H, c.E)
    q_THE, k_THE = rope(q_THE, *ctx.shared), rope(k_THE, *ctx.shared)
    a_THE = encoder_attention(q_THE, k_THE, v_THE, ctx.inputs.query_start_loc, c.scale)
    x_TD = layer_norm(x_TD + linear(a_THE.flatten(1), w.o), w.attn_norm, w.attn_norm_bias, c.eps)
    h_TD = linear(swiglu(linear(x_TD, w.gate_up)), w.down)
    return layer_norm(x_TD + h_TD, w.ffn_norm, w.ffn_norm_bias, c.eps)


GRAPH = replace(
    bert.GRAPH,
    embed_weights=embed_weights,
    layer_weights=layer_weights,
    head_weights=lambda c: c.pooling.weights(),
    embed=embed,
    layer=layer,
    head=lambda c, w, x_TD, ctx: c.pooling(w, x_TD, ctx),
)
register_model(replace(bert.MODEL, architectures=("NomicBertModel",), config=from_hf, graphs=(GRAPH,)))
