"""Models that give vectors, made of the families that generate text: the same decoder with another head. Embedders,
sequence classifiers, reward models, and rerankers that compare the logits of two tokens.

Any family with a graph that has ``norm`` serves, under the names that transformers gives such models: ``QwenModel``
for ``QwenForCausalLM``, and so on. A vector is made of the last token's hidden state, or of each token's. A decoder
that attends both ways (``is_causal`` false) computes a prompt whole; it may also use the first token's, or the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import raw, switch
from graphllm.config.pooling_config import PoolingType
from graphllm.ir import ForwardContext, Graph, Model, Weight, all_models, register_derivation
from graphllm.model_defs.common import HF
from graphllm.model_defs.pooling import Pooling
from graphllm.ops.gemm.linear import linear
from graphllm.weights.plan.expr import Expr, Read, map_parts

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_STARTS = ("model.", "transformer.", "backbone.")  # of names that a model without a head saves without them
_MOST_LABELS = 1 << 16


@dataclass(frozen=True)
class Config:
    """decoder: the family's own. pooling: which rows there are vectors of. labels: numbers of a vector, 0 for the
    hidden state. tokens: the rows of the vocabulary's matrix that a classifier is made of; difference: its one number
    is the second's less the first's."""

    decoder: Any
    V: int
    max_len: int
    pooling: Pooling
    labels: int = 0
    tokens: tuple[int, ...] = ()
    difference: bool = False


@dataclass(frozen=True)
class _Head:
    """What follows the last norm. config: of a config.json and a plain Config. weights: of ``c`` and the width. run:
    from normalized rows [R, D] to vectors. pooling: where the checkpoint does not say."""

    config: Callable[[HF, Config], Config]
    weights: Callable[[Config, int], dict[str, Weight]]
    run: Callable[[Config, SimpleNamespace, Tensor], Tensor]
    pooling: PoolingType = "LAST"


def _classifier(hf: HF, plain: Config) -> Config:
    """A classifier's. It may be made of a language model: the field ``classifier_token_ids`` has the tokens."""
    c = replace(plain, labels=labels_of(hf))
    if not (tokens := tuple(raw(hf, "classifier_token_ids") or ())):
        return c
    if any(not 0 <= i < c.V for i in tokens):
        raise ConfigError(f"config.json: classifier_token_ids is {tokens}: the vocabulary has {c.V} tokens")
    if not raw(hf, "is_original_qwen3_reranker"):
        return replace(c, labels=len(tokens), tokens=tokens)
    if len(tokens) != 2:
        raise ConfigError(f"config.json: classifier_token_ids is {tokens}: give two, the one for no first")
    return replace(c, labels=1, tokens=tokens, difference=True)


def labels_of(hf: HF) -> int:
    """How many classes a config.json has; two where it does not say, as in transformers."""
    named = raw(hf, "id2label")
    count = raw(hf, "num_labels", len(named) if isinstance(named, dict) else 2)
    if type(count) is not int or not 1 <= count <= _MOST_LABELS:
        raise ConfigError(f"config.json: num_labels is {count!r:.80}; set it to a whole number from 1 on")
    return count


def _score_weights(c: Config, width: int) -> dict[str, Weight]:
    """In float32, as their few numbers are what is wanted."""
    if c.tokens:
        return {}  # rows of the vocabulary's matrix, which the family names
    return {"score": Weight((c.labels, width), ("score.weight",), dtype="float32", exact=True)}


def _score(c: Config, w: SimpleNamespace, x_RD: Tensor) -> Tensor:
    if not c.tokens:
        return linear(x_RD.float(), w.score)
    rows = torch.cat([getattr(w, f"token{i}") for i in range(len(c.tokens))])
    if c.difference:
        rows = rows[1:] - rows[:1]
    return linear(x_RD.float(), rows)


def _reward_weights(c: Config, width: int) -> dict[str, Weight]:
    def one(number: int, rows: int) -> dict[str, Weight]:
        name = f"score.{number}"
        return {
            f"weight{number}": Weight((rows, width), (f"{name}.weight",), dtype="float32", exact=True),
            f"bias{number}": Weight((rows,), (f"{name}.bias",), dtype="float32", exact=True),
        }

    return one(0, width) | one(2, c.labels)


def _reward(c: Config, w: SimpleNamespace, x_RD: Tensor) -> Tensor:
    return linear(torch.relu(linear(x_RD.float(), w.weight0, w.bias0)), w.weight2, w.bias2)


def _rewarder(hf: HF, plain: Config) -> Config:
    return replace(plain, labels=labels_of({"num_labels": 1, **hf}))


def _judge(hf: HF, plain: Config) -> Config:
    return replace(plain, labels=labels_of({"num_labels": 2, **hf}))


_HEADS = {  # by the end of the name; the first that fits counts
    "ForSequenceClassification": _Head(_classifier, _score_weights, _score),
    "ForRewardModel": _Head(_rewarder, _reward_weights, _reward),
    "ForProcessRewardModel": _Head(_judge, _reward_weights, _reward, "ALL"),
    "ForTokenClassification": _Head(_classifier, _score_weights, _score, "ALL"),
    "Model": _Head(lambda hf, plain: plain, lambda c, width: c.pooling.weights(), lambda c, w, x_RD: x_RD),
}


def derived(architecture: str) -> Model | None:
    """The family of a name such as Qwen3Model; None where none generates text under the beginning of it."""
    for ending, head in _HEADS.items():
        if architecture.endswith(ending):
            start, known = architecture.removesuffix(ending), all_models()
            names = [s + causal for s in dict.fromkeys((start, start.removesuffix("Text"))) for causal in _CAUSAL]
            name = next((n for n in names if n in known and known[n].graphs[0].norm is not None), None)
            return None if name is None else _with_head(known[name], name, architecture, head)
    return None


def _with_head(model: Model, language_model: str, architecture: str, head: _Head) -> Model:
    """A family with the decoder of ``model``."""
    main = model.graphs[0]
    norm = main.norm
    assert norm is not None

    def config(hf: HF) -> Config:
        pooling = Pooling.from_hf(hf, head.pooling)
        causal = switch(hf, "is_causal", True)
        if causal and pooling.kind not in ("LAST", "ALL"):
            raise ConfigError(
                f"pooling_type is {pooling.kind}: {architecture} computes prompts in parts, and gives the last token's "
                "vector or all tokens'; use LAST or ALL"
            )
        decoder = model.config({**hf, "architectures": [language_model], "is_causal": True})
        if not causal:
            decoder = _both_ways(decoder, architecture)
        return head.config(hf, Config(decoder, decoder.V, decoder.max_len, pooling))

    def head_weights(c: Config) -> dict[str, Weight]:
        own, tokens = main.head_weights(c.decoder), main.embed_weights(c.decoder)["tokens"]
        norms = {name: w for name, w in own.items() if w.shard != "vocab"}
        matrix = next((w for w in own.values() if w.shard == "vocab" and not w.tie), tokens)
        rows = {
            f"token{i}": replace(
                matrix, shape=(1, matrix.shape[1]), slice_rows=(id, id + 1), shard=None, dtype="float32", exact=True
            )
            for i, id in enumerate(c.tokens)
        }
        return _either_name(norms | rows) | head.weights(c, tokens.shape[1])

    def run(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
        return head.run(c, w, c.pooling(w, x_TD, ctx, lambda x: norm(c.decoder, w, x)))

    return Model(
        architectures=(architecture,),
        config=config,
        graphs=(
            Graph(
                task="pool",
                layer_types=lambda c: main.layer_types(c.decoder),
                embed_weights=lambda c: _either_name(main.embed_weights(c.decoder)),
                layer_weights=lambda c, layer_type: _either_name(main.layer_weights(c.decoder, layer_type)),
                head_weights=head_weights,
                embed=lambda c, w, ctx: main.embed(c.decoder, w, ctx),
                layer=lambda c, layer_type, w, x_TD, ctx: main.layer(c.decoder, layer_type, w, x_TD, ctx),
                head=run,
                states=lambda c, layer_type: main.states(c.decoder, layer_type),
                inputs=lambda c: main.inputs(c.decoder),
                buckets=lambda c: main.buckets(c.decoder),
            ),
        ),
        states=lambda c: model.states(c.decoder),
        shardable=model.shardable,
        shared=model.shared,
        of_experts=model.of_experts,
        inner="decoder",
    )


def _both_ways(decoder: Any, architecture: str) -> Any:
    """The config of a decoder in which tokens see later tokens too, as in GTE-Qwen2. Raises ConfigError."""
    if not hasattr(decoder, "causal"):
        raise ConfigError(f"config.json: is_causal is False: {architecture} attends one way; set it to true")
    if decoder.window and "sliding" in decoder.layer_types:
        raise ConfigError("config.json: is_causal is False with sliding_window: not supported; turn one off")
    return replace(decoder, causal=False)


def _either_name(weights: dict[str, Weight]) -> dict[str, Weight]:
    """The same weights, also under the names that a decoder without a head saves them by."""

    def names(source: str | tuple[str, ...]) -> tuple[str, ...]:
        given = (source,) if isinstance(source, str) else source
        bare = tuple(name.removeprefix(start) for name in given for start in _STARTS if name.startswith(start))
        return tuple(dict.fromkeys((*given, *bare)))

    def read(expr: Expr) -> Expr:
        return replace(expr, sources=names(expr.sources)) if isinstance(expr, Read) else map_parts(expr, read)

    def either(w: Weight) -> Weight:
        return replace(w, sources=tuple(map(names, w.sources)), expr=read(w.expr) if isinstance(w.expr, Expr) else None)

    return {name: either(w) for name, w in weights.items()}


register_derivation(derived)
