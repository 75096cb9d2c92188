"""GPT-2: learned positions, LayerNorm, biases everywhere, and matrices that the checkpoint stores transposed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from graphllm.config.fields import MOST, number, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs.common import (
    HF,
    MOST_LAYERS,
    Sources,
    check_plain,
    head_matrix,
    only,
    split_heads,
    token_table,
    widths,
    with_bias,
)
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu",
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """D width, H query heads, K = H, E head dimension, F feed-forward width, V vocabulary, L layers."""

    D: int
    H: int
    K: int
    E: int
    F: int
    V: int
    L: int
    max_len: int
    eps: float
    scale: float
    activation: str  # "gelu_tanh", "gelu" or "relu"
    tied: bool


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    only(hf, "add_cross_attention", False)
    only(hf, "scale_attn_by_inverse_layer_idx", False)  # layers of one type must be the same function
    D, H, E = widths(hf, "n_embd", "n_head")
    return Config(
        D=D,
        H=H,
        K=H,
        E=E,
        F=whole(hf, "n_inner", 4 * D, 4 * D),
        V=whole(hf, "vocab_size", 50257),
        L=whole(hf, "n_layer", 12, le=MOST_LAYERS),
        max_len=whole(hf, "n_positions", 1024, le=MOST),
        eps=number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1),
        scale=E**-0.5 if switch(hf, "scale_attn_weights", True) else 1.0,
        activation=activation_of(hf, "activation_function"),
        tied=switch(hf, "tie_word_embeddings", True),
    )


def activation_of(hf: HF, field: str, usual: str = "gelu_new") -> str:
    """The `Config.activation` that a field asks for. usual: the field's value in files without it. Raises
    ConfigError."""
    return _ACTIVATIONS[only({field: usual} | dict(hf), field, *_ACTIVATIONS)]


def named(*names: str) -> tuple[tuple[str, ...], ...]:
    """Tensors of the model without a head, which some checkpoints are saved as."""
    return tuple(("transformer." + name, name) for name in names)


def in_layer(*names: str) -> Callable[[str], Sources]:
    """Tensors of a layer by the end of their names, "weight" or "bias"."""
    return lambda leaf: named(*(f"h.{{layer}}.{name}.{leaf}" for name in names))


def embed_weights(c: Config) -> dict[str, Weight]:
    return {
        "tokens": token_table(c, *named("wte.weight")[0]),
        "positions": Weight((c.max_len, c.D), named("wpe.weight")),
    }


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    inner, of = c.H * c.E, in_layer
    return {
        **with_bias("attn_norm", (c.D,), of("ln_1")),
        **with_bias("qkv", (3 * inner, c.D), of("attn.c_attn"), (inner,) * 3, "output", transpose=True),
        **with_bias("o", (c.D, inner), of("attn.c_proj"), shard="input", transpose=True),
        **with_bias("ffn_norm", (c.D,), of("ln_2")),
        **with_bias("up", (c.F, c.D), of("mlp.c_fc"), shard="output", transpose=True),
        **with_bias("down", (c.D, c.F), of("mlp.c_proj"), shard="input", transpose=True),
    }


def head_weights(c: Config) -> dict[str, Weight]:
    return {**with_bias("norm", (c.D,), lambda leaf: named(f"ln_f.{leaf}")), "lm_head": head_matrix(c)}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return (kv_state(c.K, c.E),)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return embedding(ctx.inputs.token_ids, w.tokens) + embedding(ctx.inputs.positions, w.positions), ()


def activate(name: str, x: Tensor) -> Tensor:
    """The plain activation: aten, because Inductor fuses it into its neighbours and nobody writes a kernel for it."""
    if name == "relu":
        return torch.nn.functional.relu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def mlp(c: Config, w: SimpleNamespace, h_TD: Tensor) -> Tensor:
    """The feed-forward part, from normalized rows to what is added to the stream. Biases are optional."""
    up_TF = linear(h_TD, w.up, getattr(w, "up_bias", None))
    return linear(activate(c.activation, up_TF), w.down, getattr(w, "down_bias", None))


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = layer_norm(x_TD, w.attn_norm, w.attn_norm_bias, c.eps)
    q_THE, k_TKE, v_TKE = split_heads(linear(h_TD, w.qkv, w.qkv_bias), c.H, c.K, c.E)
    a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, c.scale)
    x_TD = x_TD + linear(a_THE.flatten(1), w.o, w.o_bias)
    return x_TD + mlp(c, w, layer_norm(x_TD, w.ffn_norm, w.ffn_norm_bias, c.eps))


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return layer_norm(x_TD, w.norm, w.norm_bias, c.eps)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_RD = norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices))
    return linear(h_RD, w.lm_head, getattr(w, "lm_head_bias", None))


GRAPH = Graph(
    lambda c: ("layer",) * c.L, embed_weights, layer_weights, head_weights, embed, layer, head, states, norm=norm
)
MODEL = register_model(
    Model(architectures=("GPT2LMHeadModel",), config=from_hf, graphs=(GRAPH,), shardable=("H", "K", "F"))
)
