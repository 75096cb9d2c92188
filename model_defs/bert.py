"""BERT and its relatives, which see a text both ways and make vectors or classes of it: BERT (MiniLM, BGE, E5, GTE are
such), RoBERTa and XLM-R (positions begin after the padding id), DistilBERT (other names, no token types), ColBERT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from graphllm.config.fields import MOST, number, section, whole
from graphllm.config.pooling_config import DenseLayer
from graphllm.ir import ForwardContext, Graph, InputSpec, Model, Weight, register_model, select_rows
from graphllm.model_defs.common import HF, MOST_LAYERS, Sources, only, split_heads, widths, with_bias
from graphllm.model_defs.gpt2 import activate
from graphllm.model_defs.pooling import Pooling, first_rows
from graphllm.ops.attention.encoder_attention import encoder_attention
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm

GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
Classifier = Literal["", "bert", "roberta", "distilbert"]


class Names(NamedTuple):
    """What a family calls its tensors. qkv to down_norm: a layer's matrices and norms."""

    begins: tuple[str, ...]  # how a checkpoint with a head begins every name
    layer: str  # how a layer's names begin
    qkv: tuple[str, str, str]
    o: str
    o_norm: str
    up: str
    down: str
    down_norm: str


_BERT = Names(
    ("bert.", "roberta.", "model."), "encoder.layer.{layer}.",
    ("attention.self.query", "attention.self.key", "attention.self.value"), "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip
_DISTILBERT = Names(
    ("distilbert.",), "transformer.layer.{layer}.", ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin", "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """D width, H heads, E head dimension, F feed-forward width, V vocabulary, L layers."""

    D: int
    H: int
    E: int
    F: int
    V: int
    L: int
    max_len: int


@dataclass(frozen=True)
class Config(Sizes):
    first_position: int  # the row of the position table that a text's first token has
    types: int  # token types, 0 without
    eps: float
    scale: float
    activation: str
    pooling: Pooling
    names: Names
    classifier: Classifier
    labels: int  # of a classifier, 0 without


def from_hf(hf: HF) -> Config:
    """The config of a BERT or RoBERTa. Raises ConfigError for settings that are not supported."""
    architecture = hf["architectures"][0]
    only(hf, "is_decoder", False)
    only(hf, "position_embedding_type", "absolute")
    roberta = "Roberta" in architecture or "Camembert" in architecture
    first = whole(hf, "pad_token_id", 1, 1, ge=0) + 1 if roberta else 0
    classifier: Classifier = ("roberta" if roberta else "bert") if _classifies(architecture) else ""
    pooling = Pooling.from_hf(hf, "CLS")
    D, H, E = widths(hf, "hidden_size", "num_attention_heads")
    if architecture == "HF_ColBERT":
        size = whole(hf, "colbert_dim", whole(hf, "dim", 128))
        pooling = Pooling("ALL", (DenseLayer("", D, size, False, "identity"),))
    return Config(
        D=D,
        H=H,
        E=E,
        F=whole(hf, "intermediate_size", 3072),
        V=whole(hf, "vocab_size", 30522),
        L=whole(hf, "num_hidden_layers", 12, le=MOST_LAYERS),
        max_len=whole(hf, "max_position_embeddings", 512, le=MOST) - first,
        first_position=first,
        types=whole(hf, "type_vocab_size", 2, ge=0),
        eps=number(hf, "layer_norm_eps", 1e-12, ge=0, le=1),
        scale=E**-0.5,
        activation=GELU[only(hf, "hidden_act", *GELU)],
        pooling=pooling,
        names=_BERT,
        classifier=classifier,
        labels=labels_of(hf) if classifier else 0,
    )


def from_distilbert(hf: HF) -> Config:
    """The config of a DistilBERT. Raises ConfigError for settings that are not supported."""
    classifies = _classifies(hf["architectures"][0])
    D, H, E = widths(hf, "dim", "n_heads")
    return Config(
        D=D,
        H=H,
        E=E,
        F=whole(hf, "hidden_dim", 3072),
        V=whole(hf, "vocab_size", 30522),
        L=whole(hf, "n_layers", 6, le=MOST_LAYERS),
        max_len=whole(hf, "max_position_embeddings", 512, le=MOST),
        first_position=0,
        types=0,
        eps=1e-12,
        scale=E**-0.5,
        activation=GELU[only(hf, "activation", *GELU)],
        pooling=Pooling.from_hf(hf, "CLS"),
        names=_DISTILBERT,
        classifier="distilbert" if classifies else "",
        labels=labels_of(hf) if classifies else 0,
    )


def _classifies(architecture: str) -> bool:
    return architecture.endswith("ForSequenceClassification")


def labels_of(hf: HF) -> int:
    """How many classes a config.json names; 2 where it does not say."""
    return len(section(hf, "id2label")) or whole(hf, "num_labels", 2)


def _tensors(c: Config, *names: str) -> tuple[tuple[str, ...], ...]:
    """Each tensor by the names that it may have: with the prefix of a model with a head, or without it. The scale and
    bias of an old norm are gamma and beta."""

    def called(name: str) -> tuple[str, ...]:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return tuple(begin + n for n in dict.fromkeys((name, old)) for begin in (*c.names.begins, ""))

    return tuple(map(called, names))


def embed_weights(c: Config) -> dict[str, Weight]:
    of = "embeddings."
    rows = (c.first_position, c.first_position + c.max_len)
    weights = {
        "tokens": Weight((c.V, c.D), _tensors(c, of + "word_embeddings.weight"), shard="vocab"),
        "positions": Weight((c.max_len, c.D), _tensors(c, of + "position_embeddings.weight"), slice_rows=rows),
        **with_bias("norm", (c.D,), lambda leaf: _tensors(c, f"{of}LayerNorm.{leaf}")),
    }
    if c.types:
        weights["types"] = Weight((c.types, c.D), _tensors(c, of + "token_type_embeddings.weight"))
    return weights


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    names, parts = c.names, (c.H * c.E,) * 3

    def of(*tensors: str) -> Callable[[str], Sources]:
        return lambda leaf: _tensors(c, *(f"{names.layer}{name}.{leaf}" for name in tensors))

    return {
        **with_bias("qkv", (sum(parts), c.D), of(*names.qkv), parts, "output"),
        **with_bias("o", (c.D, c.H * c.E), of(names.o), shard="input"),
        **with_bias("attn_norm", (c.D,), of(names.o_norm)),
        **with_bias("up", (c.F, c.D), of(names.up), shard="output"),
        **with_bias("down", (c.D, c.F), of(names.down), shard="input"),
        **with_bias("ffn_norm", (c.D,), of(names.down_norm)),
    }


def head_weights(c: Config) -> dict[str, Weight]:
    dense = {
        "bert": _tensors(c, "pooler.dense.weight", "pooler.dense.bias"),
        "roberta": (("classifier.dense.weight",), ("classifier.dense.bias",)),
        "distilbert": (("pre_classifier.weight",), ("pre_classifier.bias",)),
    }
    if not c.classifier:
        return c.pooling.weights()
    out = "classifier.out_proj." if c.classifier == "roberta" else "classifier."
    weight, bias = dense[c.classifier]
    return {
        "dense": Weight((c.D, c.D), (weight,)),
        "dense_bias": Weight((c.D,), (bias,)),
        "classifier": Weight((c.labels, c.D), (out + "weight",)),
        "classifier_bias": Weight((c.labels,), (out + "bias",)),
    }


def token_types(c: Any) -> tuple[InputSpec, ...]:
    """The input that tells which of two texts a token is of, for a family with several token types."""
    return (InputSpec("token_types", ("T",), provider="token_types"),) if c.types > 1 else ()


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    x_TD = embedding(ctx.inputs.token_ids, w.tokens) + embedding(ctx.inputs.positions, w.positions)
    return layer_norm(add_token_types(c, w, x_TD, ctx), w.norm, w.norm_bias, c.eps), ()


def add_token_types(c: Any, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """The embedding with that of each token's type."""
    if c.types > 1:
        return x_TD + embedding(ctx.inputs.token_types, w.types)
    return x_TD + w.types if c.types else x_TD


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    heads = split_heads(linear(x_TD, w.qkv, w.qkv_bias), c.H, c.H, c.E)
    a_THE = encoder_attention(*heads, ctx.inputs.query_start_loc, c.scale)
    x_TD = layer_norm(x_TD + linear(a_THE.flatten(1), w.o, w.o_bias), w.attn_norm, w.attn_norm_bias, c.eps)
    h_TD = linear(activate(c.activation, linear(x_TD, w.up, w.up_bias)), w.down, w.down_bias)
    return layer_norm(x_TD + h_TD, w.ffn_norm, w.ffn_norm_bias, c.eps)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    if not c.classifier:
        return c.pooling(w, x_TD, ctx)
    between: Callable[[Tensor], Tensor] = torch.relu if c.classifier == "distilbert" else torch.tanh
    h_RD = between(linear(select_rows(x_TD, first_rows(ctx)), w.dense, w.dense_bias))
    return linear(h_RD, w.classifier, w.classifier_bias)


GRAPH = Graph(
    lambda c: ("layer",) * c.L, embed_weights, layer_weights, head_weights, embed, layer, head,
    inputs=token_types, task="pool",
)  # fmt: skip
_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification")
_LIKE_BERT = [name + end for name in ("Bert", "Roberta", "XLMRoberta", "Camembert") for end in _HEADS]

MODEL = register_model(
    Model(architectures=(*_LIKE_BERT, "HF_ColBERT"), config=from_hf, graphs=(GRAPH,), shardable=("H", "F"))
)
register_model(replace(MODEL, architectures=tuple("DistilBert" + end for end in _HEADS), config=from_distilbert))
