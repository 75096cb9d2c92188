"""ModernBERT: norms before each part, rotary positions, gated feed-forward layers, and windows in most layers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor

from graphllm.config.fields import MOST, number, raw, strings, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, Weight, register_model
from graphllm.model_defs.bert import GELU, labels_of
from graphllm.model_defs.common import HF, MOST_LAYERS, layer_types_of, only, split_heads, widths
from graphllm.model_defs.gpt2 import activate
from graphllm.model_defs.pooling import Pooling
from graphllm.ops.activations.geglu import geglu
from graphllm.ops.attention.encoder_attention import encoder_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table import Rope
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm

_GATED = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
_FIRST = "first_"  # before the type of the first layer, which has no norm before its attention
_THETA = {"full": ("full_attention", "global_rope_theta", 160_000.0),
          "sliding": ("sliding_attention", "local_rope_theta", 10_000.0)}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """D width, H heads, E head dimension, F feed-forward width, V vocabulary. window: tokens that a "sliding" layer
    sees on each side. labels: of a classifier, 0 without."""

    D: int
    H: int
    E: int
    F: int
    V: int
    max_len: int
    layer_types: tuple[str, ...]
    window: int
    eps: float
    scale: float
    ropes: tuple[Rope, ...]  # of "full" layers, then of "sliding" ones
    gate: str
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    pooling: Pooling
    classifier_bias: bool
    classifier_activation: str
    labels: int


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    D, H, E = widths(hf, "hidden_size", "num_attention_heads")
    L = whole(hf, "num_hidden_layers", 22, le=MOST_LAYERS)
    classifies = hf["architectures"][0].endswith("ForSequenceClassification")
    pooling = Pooling.from_hf(hf, "CLS")
    if classifies:
        pooling = Pooling("MEAN" if only(hf, "classifier_pooling", "cls", "mean") == "mean" else "CLS")
    return Config(
        D=D,
        H=H,
        E=E,
        F=whole(hf, "intermediate_size", 1152),
        V=whole(hf, "vocab_size", 50_368),
        max_len=whole(hf, "max_position_embeddings", 8192, le=MOST),
        layer_types=_layer_types(hf, L),
        window=whole(hf, "local_attention", 128, le=MOST) // 2,
        eps=number(hf, "norm_eps", 1e-5, ge=0, le=1),
        scale=E**-0.5,
        ropes=tuple(_rope(hf, E, layer_type) for layer_type in _THETA),
        gate=_GATED[only(hf, "hidden_activation", *_GATED)],
        norm_bias=switch(hf, "norm_bias", False),
        attention_bias=switch(hf, "attention_bias", False),
        mlp_bias=switch(hf, "mlp_bias", False),
        pooling=pooling,
        classifier_bias=switch(hf, "classifier_bias", False),
        classifier_activation=GELU[only(hf, "classifier_activation", *GELU)],
        labels=labels_of(hf) if classifies else 0,
    )


def _layer_types(hf: HF, L: int) -> tuple[str, ...]:
    if names := strings(hf, "layer_types"):
        types = layer_types_of(names, L)
    else:
        every = whole(hf, "global_attn_every_n_layers", 3)
        types = tuple("sliding" if i % every else "full" for i in range(L))
    return (_FIRST + types[0], *types[1:])


def _rope(hf: HF, E: int, layer_type: str) -> Rope:
    name, older, theta = _THETA[layer_type]
    theta = number(hf, older, theta, theta, gt=0)
    limits = {"max_position_embeddings": whole(hf, "max_position_embeddings", 8192, le=MOST)}
    if raw(hf, "rope_parameters"):
        return Rope.from_hf({**hf, **limits}, E, name, theta)
    return Rope.from_hf({"rope_theta": theta, **limits}, E)


def _named(name: str) -> tuple[tuple[str, ...]]:
    return (("model." + name, name),)


def _norm(c: Config, label: str, name: str) -> dict[str, Weight]:
    found = {label: Weight((c.D,), _named(f"{name}.weight"))}
    return found | ({f"{label}_bias": Weight((c.D,), _named(f"{name}.bias"))} if c.norm_bias else {})


def embed_weights(c: Config) -> dict[str, Weight]:
    return {
        "tokens": Weight((c.V, c.D), _named("embeddings.tok_embeddings.weight"), shard="vocab"),
        **_norm(c, "norm", "embeddings.norm"),
        "inv_freq_full": c.ropes[0].weight(),
        "inv_freq_sliding": c.ropes[1].weight(),
    }


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    hf, inner = "layers.{layer}.", c.H * c.E
    parts = (inner,) * 3
    weights = {
        "qkv": Weight((3 * inner, c.D), _named(hf + "attn.Wqkv.weight"), parts, shard="output"),
        "o": Weight((c.D, inner), _named(hf + "attn.Wo.weight"), shard="input"),
        **_norm(c, "ffn_norm", hf + "mlp_norm"),
        "gate_up": Weight((2 * c.F, c.D), _named(hf + "mlp.Wi.weight"), (c.F, c.F), shard="output"),
        "down": Weight((c.D, c.F), _named(hf + "mlp.Wo.weight"), shard="input"),
    }
    if not layer_type.startswith(_FIRST):
        weights |= _norm(c, "attn_norm", hf + "attn_norm")
    if c.attention_bias:
        weights["qkv_bias"] = Weight((3 * inner,), _named(hf + "attn.Wqkv.bias"), parts, shard="output")
        weights["o_bias"] = Weight((c.D,), _named(hf + "attn.Wo.bias"))
    if c.mlp_bias:
        weights["gate_up_bias"] = Weight((2 * c.F,), _named(hf + "mlp.Wi.bias"), (c.F, c.F), shard="output")
        weights["down_bias"] = Weight((c.D,), _named(hf + "mlp.Wo.bias"))
    return weights


def head_weights(c: Config) -> dict[str, Weight]:
    weights = _norm(c, "norm", "final_norm")
    if not c.labels:
        return weights | c.pooling.weights()
    weights |= {
        "dense": Weight((c.D, c.D), ("head.dense.weight",)),
        **_norm(c, "dense_norm", "head.norm"),
        "classifier": Weight((c.labels, c.D), ("classifier.weight",)),
        "classifier_bias": Weight((c.labels,), ("classifier.bias",)),
    }
    return weights | ({"dense_bias": Weight((c.D,), ("head.dense.bias",))} if c.classifier_bias else {})


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    at = ctx.inputs.positions
    angles = (*c.ropes[0].table(at, w.inv_freq_full), *c.ropes[1].table(at, w.inv_freq_sliding))
    return _normed(c, w, "norm", embedding(ctx.inputs.token_ids, w.tokens)), angles


def _normed(c: Config, w: SimpleNamespace, label: str, x: Tensor) -> Tensor:
    return layer_norm(x, getattr(w, label), getattr(w, f"{label}_bias", None), c.eps)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    first, sliding = layer_type.startswith(_FIRST), layer_type.endswith("sliding")
    angles = ctx.shared[2:] if sliding else ctx.shared[:2]
    h_TD = x_TD if first else _normed(c, w, "attn_norm", x_TD)
    q_THE, k_THE, v_THE = split_heads(linear(h_TD, w.qkv, getattr(w, "qkv_bias", None)), c.H, c.H, c.E)
    a_THE = encoder_attention(
        rope(q_THE, *angles), rope(k_THE, *angles), v_THE, ctx.inputs.query_start_loc, c.scale,
        c.window if sliding else 0,
    )  # fmt: skip
    x_TD = x_TD + linear(a_THE.flatten(1), w.o, getattr(w, "o_bias", None))
    gate_up_T2F = linear(_normed(c, w, "ffn_norm", x_TD), w.gate_up, getattr(w, "gate_up_bias", None))
    return x_TD + linear(geglu(gate_up_T2F, c.gate), w.down, getattr(w, "down_bias", None))


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    x = c.pooling(w, x_TD, ctx, lambda x: _normed(c, w, "norm", x))
    if not c.labels:
        return x
    h_RD = activate(c.classifier_activation, linear(x.to(w.dense.dtype), w.dense, getattr(w, "dense_bias", None)))
    return linear(_normed(c, w, "dense_norm", h_RD), w.classifier, w.classifier_bias)


GRAPH = Graph(lambda c: c.layer_types, embed_weights, layer_weights, head_weights, embed, layer, head, task="pool")
_NAMES = ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification")
register_model(Model(architectures=_NAMES, config=from_hf, graphs=(GRAPH,), shardable=("H", "F")))
