"""The family of models that transformers' own code defines: a `Model` whose functions run recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.compile.transformers_model.adoption import Adopted, adopt, adopt_share
from graphllm.compile.transformers_model.report import ordinary_ops
from graphllm.compile.transformers_model.source import model_class
from graphllm.config.fields import MAX_MODEL_LEN, READ, note, strings
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight
from graphllm.program.manifest import Implementation


@dataclass(frozen=True)
class Config:
    """text: the fields of config.json, as JSON with sorted names. longest: the longest context that is compiled for.
    degree: of how many tensor-parallel ranks it is one. experts_apart: whether they divide experts by number."""

    V: int
    max_len: int
    layer_types: tuple[str, ...]
    text: str
    longest: int
    degree: int = 1
    experts_apart: bool = False

    @property
    def model(self) -> Adopted:
        """The rank's share of the model as recipes."""
        return adopt_share(self.text, self.longest, self.degree, self.experts_apart)


@dataclass(frozen=True)
class _Traced(Model):
    """A family whose weights say how ranks divide them."""

    def local(self, c: Config, degree: int, experts_apart: bool = False) -> Config:
        made = replace(c, degree=degree, experts_apart=experts_apart)
        assert made.model is not None  # it raises ConfigError for what cannot be divided
        return made


def adopted(model_config: Mapping[str, Any]) -> Model:
    """The family of a config.json whose model transformers has. Raises ConfigError where it has none that generates
    text, or a repository would bring the code."""
    model_class(model_config)
    return _Traced(
        architectures=strings(model_config, "architectures"), config=_config, graphs=(_GRAPH,), shardable=("degree",),
        traced=_implementation,
    )  # fmt: skip


def _config(hf: Mapping[str, Any]) -> Config:
    fields = {n: v for n, v in hf.items() if n not in (READ, MAX_MODEL_LEN)}
    text, longest = json.dumps(fields, sort_keys=True), hf.get(MAX_MODEL_LEN) or 0
    model = adopt(text, longest)
    note(hf, *_names(fields))
    return Config(model.vocabulary, model.max_len, model.layer_types, text, longest)


def _names(fields: Mapping[str, Any]) -> Iterator[str]:
    """Of all fields, and of those within them."""
    for name, value in fields.items():
        yield name
        if isinstance(value, Mapping):
            yield from _names(value)


def _implementation(c: Config) -> Implementation:
    return Implementation(c.model.name, transformers=True, ordinary=ordinary_ops(c.model))


def _layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    return c.model.layers[layer_type].weights


def _embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, *shared = c.model.embed.run(w, ctx)
    return x, tuple(shared)


def _layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return c.model.layers[layer_type].run(w, ctx, x_TD)[0]


def _head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return c.model.head.run(w, ctx, x_TD)[0]


def _states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return c.model.states(layer_type)


_GRAPH = Graph(
    layer_types=lambda c: c.layer_types,
    embed_weights=lambda c: c.model.embed.weights,
    layer_weights=_layer_weights,
    head_weights=lambda c: c.model.head.weights,
    embed=_embed,
    layer=_layer,
    head=_head,
    states=_states,
)
