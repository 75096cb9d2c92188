"""BLOOM: GPT-2's layers with ALiBi in place of learned positions, a norm of the embedding, and queries, keys and values
of each head stored together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config.fields import number, switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import gpt2
from graphllm.model_defs.alibi import (
    alibi_attention,
    alibi_state,
    position_channels,
    position_range,
    slope_weight,
    slopes_of,
)
from graphllm.model_defs.common import (
    HF,
    MOST_LAYERS,
    also_named,
    by_turns,
    check_plain,
    only,
    split_heads,
    token_table,
    widths,
    with_bias,
)
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm


@dataclass(frozen=True)
class Config(gpt2.Config):
    slopes: tuple[float, ...]  # of ALiBi: of all heads, also where H is a rank's share of them


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    hf = also_named(hf, n_head="num_attention_heads", n_layer="num_hidden_layers", hidden_size="n_embed")
    only(hf, "apply_residual_connection_post_layernorm", False)
    D, H, E = widths(hf, "hidden_size", "n_head", (64, 8))
    return Config(
        D=D,
        H=H,
        K=H,
        E=E,
        F=4 * D,
        V=whole(hf, "vocab_size", 250880),
        L=whole(hf, "n_layer", 2, le=MOST_LAYERS),
        max_len=position_range(hf, "seq_length", 2048),
        eps=number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1),
        scale=E**-0.5,
        activation="gelu_tanh",
        tied=switch(hf, "tie_word_embeddings", True),
        slopes=slopes_of(H),
    )


def embed_weights(c: Config) -> dict[str, Weight]:
    return {
        "tokens": token_table(c, *gpt2.named("word_embeddings.weight")[0]),
        **with_bias("norm", (c.D,), lambda leaf: gpt2.named(f"word_embeddings_layernorm.{leaf}")),
    }


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    of, inner, turn = gpt2.in_layer, c.H * c.E, (c.E,) * 3
    (matrix,), (bias,) = (of("self_attention.query_key_value")(leaf) for leaf in ("weight", "bias"))
    merged = Weight((3 * inner, c.D), (), (inner,) * 3, shard="output", heads=(c.H,) * 3)
    return {
        **with_bias("attn_norm", (c.D,), of("input_layernorm")),
        "qkv": replace(merged, expr=by_turns(matrix, c.H, turn, c.D)),
        "qkv_bias": replace(merged, shape=(3 * inner,), expr=by_turns(bias, c.H, turn)),
        "slopes": slope_weight(c.slopes[: c.H], c.E, c.scale),
        **with_bias("o", (c.D, inner), of("self_attention.dense"), shard="input"),
        **with_bias("ffn_norm", (c.D,), of("post_attention_layernorm")),
        **with_bias("up", (c.F, c.D), of("mlp.dense_h_to_4h"), shard="output"),
        **with_bias("down", (c.D, c.F), of("mlp.dense_4h_to_h"), shard="input"),
    }


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return (alibi_state(c.K, c.E),)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    x_TD = layer_norm(embedding(ctx.inputs.token_ids, w.tokens), w.norm, w.norm_bias, c.eps)
    return x_TD, (position_channels(ctx.inputs.positions, c.E, x_TD.dtype),)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    qkv_TO = linear(layer_norm(x_TD, w.attn_norm, w.attn_norm_bias, c.eps), w.qkv, w.qkv_bias)
    a_THE = alibi_attention(split_heads(qkv_TO, c.H, c.K, c.E), w.slopes, ctx, c.scale)
    x_TD = x_TD + linear(a_THE.flatten(1), w.o, w.o_bias)
    return x_TD + gpt2.mlp(c, w, layer_norm(x_TD, w.ffn_norm, w.ffn_norm_bias, c.eps))


register_model(
    replace(
        gpt2.MODEL,
        architectures=("BloomForCausalLM",),
        config=from_hf,
        graphs=(
            replace(
                gpt2.GRAPH,
                embed_weights=embed_weights,
                layer_weights=layer_weights,
                embed=embed,
                layer=layer,
                states=states,
            ),
        ),
    )
)
