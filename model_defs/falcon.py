"""Falcon: attention and feed-forward part side by side, with a norm for both or one each, and few heads of keys and
values. Falcon-RW has the layers of GPT-2, and ALiBi in place of rotary positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, switch, whole
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
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table import Rope
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm


@dataclass(frozen=True)
class Config(gpt2.Config):
    """K: heads of keys and values, 1 in the 7B.

    norms: "one" before both parts of a layer, "two", one for each part, or "in turn", where the feed-forward part
        follows attention.
    turns: how often queries, keys and values follow each other in the stored projection.
    bias: whether projections have one.
    rope: None with ALiBi.
    slopes: of ALiBi, of all heads, also where H is a rank's share of them; else empty.
    """

    norms: Literal["one", "two", "in turn"]
    turns: int
    bias: bool
    rope: Rope | None
    slopes: tuple[float, ...]


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    hf = also_named({"max_position_embeddings": 2048} | dict(hf), hidden_size="n_embed")
    D, H, E = widths(hf, "hidden_size", "num_attention_heads", (4544, 71))
    new, alibi = switch(hf, "new_decoder_architecture", False), switch(hf, "alibi", False)
    single = switch(hf, "multi_query", True) and not new
    K = 1 if single else whole(hf, "num_kv_heads", H, H)
    if H % K or (not new and not single and K != H):
        right = f"a divisor of {H}" if new else str(H)
        raise ConfigError(f"config.json: num_kv_heads is {K}, with {H} query heads; set it to {right}")
    scale = E**-0.5
    return Config(
        D=D,
        H=H,
        K=K,
        E=E,
        F=whole(hf, "ffn_hidden_size", 4 * D, 4 * D),
        V=whole(hf, "vocab_size", 65024),
        L=whole(hf, "num_hidden_layers", 32, le=MOST_LAYERS),
        max_len=(position_range(hf, "max_position_embeddings", 2048) if alibi
                 else whole(hf, "max_position_embeddings", le=MOST)),
        eps=number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1),
        scale=scale,
        activation=gpt2.activation_of(hf, "activation", "gelu"),
        tied=switch(hf, "tie_word_embeddings", True),
        norms=_norms(hf, new),
        turns=1 if single else K,
        bias=switch(hf, "bias", False),
        rope=None if alibi else Rope.from_hf(hf, E),
        slopes=tuple(slope * scale for slope in slopes_of(H)) if alibi else (),
    )  # fmt: skip


def _norms(hf: HF, new: bool) -> Literal["one", "two", "in turn"]:
    count, parallel = (
        only(hf, "num_ln_in_parallel_attn", None, 1, *((2,) if new else ())),
        switch(hf, "parallel_attn", True),
    )
    if not new:
        return "one" if parallel else "in turn"
    only(hf, "parallel_attn", True)
    return "one" if count == 1 else "two"


def embed_weights(c: Config) -> dict[str, Weight]:
    tokens = token_table(c, *gpt2.named("word_embeddings.weight")[0])
    return {"tokens": tokens} if c.rope is None else {"tokens": tokens, "inv_freq": c.rope.weight()}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    of, (attn, mlp) = gpt2.in_layer, {
        "one": ("input_layernorm", ""),
        "two": ("ln_attn", "ln_mlp"),
        "in turn": ("input_layernorm", "post_attention_layernorm"),
    }[c.norms]  # fmt: skip
    parts = (c.H * c.E, c.K * c.E, c.K * c.E)
    turn = tuple(rows // c.turns for rows in parts)
    (matrix,), (bias,) = (of("self_attention.query_key_value")(leaf) for leaf in ("weight", "bias"))
    merged = Weight((sum(parts), c.D), (), parts, shard="output", heads=(c.H, c.K, c.K))
    weights = {
        **with_bias("attn_norm", (c.D,), of(attn)),
        **(with_bias("ffn_norm", (c.D,), of(mlp)) if mlp else {}),
        "qkv": replace(merged, expr=by_turns(matrix, c.turns, turn, c.D)),
        "qkv_bias": replace(merged, shape=(sum(parts),), expr=by_turns(bias, c.turns, turn)),
        **with_bias("o", (c.D, c.H * c.E), of("self_attention.dense"), shard="input"),
        **with_bias("up", (c.F, c.D), of("mlp.dense_h_to_4h"), shard="output"),
        **with_bias("down", (c.D, c.F), of("mlp.dense_4h_to_h"), shard="input"),
    }
    if not c.bias:
        for name in ("qkv", "o", "up", "down"):
            del weights[f"{name}_bias"]
    return weights if c.rope else weights | {"slopes": slope_weight(c.slopes[: c.H], c.E, c.scale)}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return (kv_state(c.K, c.E) if c.rope else alibi_state(c.K, c.E),)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    x_TD = embedding(ctx.inputs.token_ids, w.tokens)
    if c.rope is None:
        return x_TD, (position_channels(ctx.inputs.positions, c.E, x_TD.dtype),)
    return x_TD, c.rope.table(ctx.inputs.positions, w.inv_freq)


def _attend(c: Config, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """From normalized rows to what is added to the stream."""
    q_THE, k_TKE, v_TKE = split_heads(linear(h_TD, w.qkv, getattr(w, "qkv_bias", None)), c.H, c.K, c.E)
    if c.rope is None:
        a_THE = alibi_attention((q_THE, k_TKE, v_TKE), w.slopes, ctx, c.scale)
    else:
        q_THE, k_TKE = rope(q_THE, *ctx.shared), rope(k_TKE, *ctx.shared)
        a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, scale=c.scale)
    return linear(a_THE.flatten(1), w.o, getattr(w, "o_bias", None))


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = layer_norm(x_TD, w.attn_norm, w.attn_norm_bias, c.eps)
    a_TD = _attend(c, w, h_TD, ctx)
    if c.norms == "in turn":
        x_TD = x_TD + a_TD
        return x_TD + gpt2.mlp(c, w, layer_norm(x_TD, w.ffn_norm, w.ffn_norm_bias, c.eps))
    if c.norms == "two":
        h_TD = layer_norm(x_TD, w.ffn_norm, w.ffn_norm_bias, c.eps)
    return x_TD + (a_TD + gpt2.mlp(c, w, h_TD))


register_model(
    replace(
        gpt2.MODEL,
        architectures=("FalconForCausalLM",),
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
        shared=("K",),
    )
)
