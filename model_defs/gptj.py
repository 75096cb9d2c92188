"""GPT-J: attention and feed-forward part side by side after one norm, heads that are rotated in part, neighbours
together, and a head with biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, switch, whole
from graphllm.ir import ForwardContext, Weight, register_model
from graphllm.model_defs import gpt2
from graphllm.model_defs.common import HF, MOST_LAYERS, also_named, check_plain, only, token_table, widths, with_bias
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table import Rope
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm

_THETA = 10000.0


@dataclass(frozen=True)
class Config(gpt2.Config):
    rope: Rope


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``, also of CodeGen's. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    hf = also_named(
        hf, n_positions="max_position_embeddings", n_embd="hidden_size", n_head="num_attention_heads",
        n_layer="num_hidden_layers",
    )  # fmt: skip
    only(hf, "rotary", True)
    only(hf, "scale_attn_weights", True)
    D, H, E = widths(hf, "n_embd", "n_head", (4096, 16))
    rotated = whole(hf, "rotary_dim", 64, ge=2)
    if rotated > E or rotated % 2:
        raise ConfigError(f"config.json: rotary_dim is {rotated}; set it to an even number up to a head's {E} numbers")
    return Config(
        D=D,
        H=H,
        K=H,
        E=E,
        F=whole(hf, "n_inner", 4 * D, 4 * D),
        V=whole(hf, "vocab_size", 50400),
        L=whole(hf, "n_layer", 28, le=MOST_LAYERS),
        max_len=whole(hf, "n_positions", 2048, le=MOST),
        eps=number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1),
        scale=E**-0.5,
        activation=gpt2.activation_of(hf, "activation_function"),
        tied=switch(hf, "tie_word_embeddings", False),
        rope=Rope(tuple(_THETA ** (-i / rotated) for i in range(0, rotated, 2))),
    )


def embed_weights(c: Config) -> dict[str, Weight]:
    return {"tokens": token_table(c, *gpt2.named("wte.weight")[0]), "inv_freq": c.rope.weight()}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    of, inner = gpt2.in_layer, c.H * c.E
    projections = of("attn.q_proj", "attn.v_proj", "attn.k_proj")("weight")
    return {
        **with_bias("norm", (c.D,), of("ln_1")),
        "qvk": Weight((3 * inner, c.D), projections, (inner,) * 3, shard="output", heads=(c.H,) * 3),
        "o": Weight((c.D, inner), of("attn.out_proj")("weight"), shard="input"),
        **with_bias("up", (c.F, c.D), of("mlp.fc_in"), shard="output"),
        **with_bias("down", (c.D, c.F), of("mlp.fc_out"), shard="input"),
    }


def head_weights(c: Config) -> dict[str, Weight]:
    return gpt2.head_weights(c) | {"lm_head_bias": Weight((c.V,), ("lm_head.bias",), shard="vocab")}


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return embedding(ctx.inputs.token_ids, w.tokens), c.rope.table(ctx.inputs.positions, w.inv_freq)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = layer_norm(x_TD, w.norm, w.norm_bias, c.eps)
    q_THE, v_THE, k_THE = linear(h_TD, w.qvk).unflatten(1, (3 * c.H, c.E)).chunk(3, 1)
    q_THE, k_THE = (rope(rows, *ctx.shared, interleaved=True) for rows in (q_THE, k_THE))
    a_THE = paged_attention(q_THE, k_THE, v_THE, ctx.state.kv, *ctx.attn, scale=c.scale)
    return x_TD + (linear(a_THE.flatten(1), w.o) + gpt2.mlp(c, w, h_TD))


GRAPH = replace(
    gpt2.GRAPH,
    embed_weights=embed_weights,
    layer_weights=layer_weights,
    head_weights=head_weights,
    embed=embed,
    layer=layer,
)
MODEL = register_model(replace(gpt2.MODEL, architectures=("GPTJForCausalLM",), config=from_hf, graphs=(GRAPH,)))
