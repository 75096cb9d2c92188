"""GPT-Neo: GPT-2's layers with separate projections and scores that are not scaled; in every other layer a window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, raw, switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import gpt2
from graphllm.model_defs.common import (
    HF,
    MOST_LAYERS,
    also_named,
    check_plain,
    layer_types_of,
    split_heads,
    widths,
    with_bias,
)
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm

_TYPES = "attention_types"


@dataclass(frozen=True)
class Config(gpt2.Config):
    layer_types: tuple[str, ...]  # "full" or "sliding"
    window: int


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    hf = also_named(hf, num_heads="num_attention_heads", num_layers="num_hidden_layers")
    D, H, E = widths(hf, "hidden_size", "num_heads", (2048, 16))
    L = whole(hf, "num_layers", 24, le=MOST_LAYERS)
    return Config(
        D=D,
        H=H,
        K=H,
        E=E,
        F=whole(hf, "intermediate_size", 4 * D, 4 * D),
        V=whole(hf, "vocab_size", 50257),
        L=L,
        max_len=whole(hf, "max_position_embeddings", 2048, le=MOST),
        eps=number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1),
        scale=1.0,
        activation=gpt2.activation_of(hf, "activation_function"),
        tied=switch(hf, "tie_word_embeddings", True),
        layer_types=layer_types_of(
            _each(raw(hf, _TYPES) or [[["global", "local"], 12]]), L, {"global": "full", "local": "sliding"}, _TYPES
        ),
        window=whole(hf, "window_size", 256, le=MOST),
    )


def _each(groups: Any) -> tuple[str, ...]:
    """The types of all layers, of pairs of types and how often they are repeated."""
    try:
        return tuple(str(kind) for kinds, times in groups for kind in tuple(kinds) * min(int(times), MOST_LAYERS))
    except (TypeError, ValueError) as damage:
        raise ConfigError(
            f'config.json: {_TYPES} is {groups!r:.80}; set it to the checkpoint\'s, such as [[["global", "local"], 12]]'
        ) from damage


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    of, inner, attn = gpt2.in_layer, c.H * c.E, "attn.attention."
    projections = of(*(f"{attn}{name}_proj" for name in "qkv"))("weight")
    return {
        **with_bias("attn_norm", (c.D,), of("ln_1")),
        "qkv": Weight((3 * inner, c.D), projections, (inner,) * 3, shard="output", heads=(c.H,) * 3),
        **with_bias("o", (c.D, inner), of(attn + "out_proj"), shard="input"),
        **with_bias("ffn_norm", (c.D,), of("ln_2")),
        **with_bias("up", (c.F, c.D), of("mlp.c_fc"), shard="output"),
        **with_bias("down", (c.D, c.F), of("mlp.c_proj"), shard="input"),
    }


def _window(c: Config, layer_type: str) -> int:
    return c.window if layer_type == "sliding" else 0


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return (kv_state(c.K, c.E, _window(c, layer_type)),)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD, window = layer_norm(x_TD, w.attn_norm, w.attn_norm_bias, c.eps), _window(c, layer_type)
    heads = split_heads(linear(h_TD, w.qkv), c.H, c.K, c.E)
    a_THE = paged_attention(*heads, ctx.state.kv, *ctx.attn, scale=c.scale, window=window)
    x_TD = x_TD + linear(a_THE.flatten(1), w.o, w.o_bias)
    return x_TD + gpt2.mlp(c, w, layer_norm(x_TD, w.ffn_norm, w.ffn_norm_bias, c.eps))


register_model(
    replace(
        gpt2.MODEL,
        architectures=("GPTNeoForCausalLM",),
        config=from_hf,
        graphs=(
            replace(
                gpt2.GRAPH,
                layer_types=lambda c: c.layer_types,
                layer_weights=layer_weights,
                layer=layer,
                states=states,
            ),
        ),
    )
)
