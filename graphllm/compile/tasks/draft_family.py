"""A draft graph joins a model: its functions bound to its own Config, its weights read from the second checkpoint or
shared with the model, and the hidden states that it reads of the model's main graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.ir.model import Graph, Hidden, Model
from graphllm.ir.weight import Weight
from graphllm.weights.checkpoint.checkpoint import DRAFT, MAIN, draft_name
from graphllm.weights.plan.expr import Expr, renamed

_WEIGHTS = ("embed_weights", "layer_weights", "head_weights", "project_weights")
_FUNCTIONS = (
    "layer_types", "embed", "layer", "head", "states", "inputs", "buckets", "hidden", "project", "drafts_at_once",
    "context", "mask_token",
)  # fmt: skip


def joined(model: Model, c: Any, drafter: Model, own: Any) -> Model:
    """The family with another one's graph as its draft graph. c, own: the Config of each. Raises ConfigError for two
    that do not fit."""
    graph, *others = drafter.graphs
    kept = [s.name for t in set(graph.layer_types(own)) for s in graph.states(own, t) if s.axis == "slot"]
    if others or graph.task not in ("draft", "generate") or graph.inputs(own) or drafter.states(own) or kept:
        raise ConfigError(f"the draft model's architecture, {', '.join(drafter.architectures)}, is none that drafts")
    if own.V != c.V:
        raise ConfigError(
            f"the draft model has a vocabulary of {own.V} tokens, the model one of {c.V}; use one that was made for it"
        )

    def bound(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return function and (lambda c, *rest: function(own, *rest))

    main = _MainWeights(model.graphs[0], c)

    def weights(function: Callable[..., dict[str, Weight]]) -> Callable[..., dict[str, Weight]]:
        return lambda c, *rest: {n: main.of_second(w) for n, w in function(own, *rest).items()}

    changed: dict[str, Any] = {name: bound(getattr(graph, name)) for name in _FUNCTIONS}
    changed |= {name: weights(getattr(graph, name)) for name in _WEIGHTS}
    drafts = dataclasses.replace(graph, name=DRAFT, task="draft", **changed)
    if (hidden := reads(drafts, model.graphs[0], c)) is not None and hidden.normed:
        drafts = _after_norm(drafts, model, c, hidden)
    return dataclasses.replace(model, graphs=(*model.graphs, drafts))


def reads(graph: Graph, main: Graph, c: Any) -> Hidden | None:
    """The hidden states that a draft graph reads of the main one, layers counted from 0. Raises ConfigError for layers
    that there are not."""
    count = len(main.layer_types(c))
    found = graph.hidden(c, count)
    if found is None:
        return None
    if wrong := [i for i in found.layers if not -count <= i < count]:
        raise ConfigError(f"the draft model reads the hidden state of layer {wrong[0]}, the model has {count} layers")
    return found._replace(layers=tuple(i % count for i in found.layers))


def check_width(hidden: Hidden, width: Any) -> None:
    """Raises ConfigError for a draft graph that reads hidden states of another width than the model's."""
    if hidden.size != width:
        raise ConfigError(
            f"the draft model reads hidden states of {hidden.size} numbers, the model's have {width}; use one that was "
            "made for it"
        )


class _MainWeights:
    """What a draft model may share with the model."""

    def __init__(self, graph: Graph, c: Any) -> None:
        self._found = {f"embed.{n}": w for n, w in graph.embed_weights(c).items()}
        self._found |= {f"head.{n}": w for n, w in graph.head_weights(c).items()}

    def of_second(self, w: Weight) -> Weight:
        """A weight of the draft model, which is read from the second checkpoint or tied to one of the first."""
        if w.tie is not None and w.tie.startswith(MAIN):
            root = self._root(w)
            return dataclasses.replace(w, tie=root, shard=self._found[root].shard)
        if w.tie is not None:
            return dataclasses.replace(w, tie=f"{DRAFT}.{w.tie}")
        sources = tuple(draft_name(s) if isinstance(s, str) else tuple(map(draft_name, s)) for s in w.sources)
        expr = renamed(w.expr, draft_name) if isinstance(w.expr, Expr) else w.expr
        return dataclasses.replace(w, sources=sources, expr=expr)

    def _root(self, w: Weight) -> str:
        to = w.tie.removeprefix(MAIN)  # type: ignore[union-attr]
        while (found := self._found.get(to)) is not None and found.tie is not None:
            to = found.tie
        if found is None:
            raise ConfigError(f"the draft model shares the model's {to}, and this architecture has none of that name")
        if found.shape != w.shape:
            raise ConfigError(
                f"the draft model shares the model's {to} as {list(w.shape)}, it is {list(found.shape)}; use a draft "
                "model that was made for it"
            )
        return to


def _after_norm(graph: Graph, model: Model, c: Any, hidden: Hidden) -> Graph:
    """The draft graph, reading what the main graph's last norm makes of its hidden states."""
    main = model.graphs[0]
    norm, project, before = main.norm, graph.project, graph.project_weights
    if norm is None:
        raise ConfigError(
            f"{', '.join(model.architectures)} does not say what its last norm is, which this kind of draft model "
            "reads; use method eagle3, draft_model or ngram"
        )
    own = {f"main_{n}": Weight(w.shape, tie=f"head.{n}") for n, w in main.head_weights(c).items() if len(w.shape) == 1}

    def projected(own_c: Any, w: Any, hidden_TD: Tensor) -> Tensor:
        parts = hidden_TD.unflatten(-1, (-1, hidden.size)).unbind(1)
        mains = SimpleNamespace(**{n.removeprefix("main_"): getattr(w, n) for n in own})
        normed = [norm(c, mains, part) for part in parts]
        joint = normed[0] if len(normed) == 1 else torch.cat(normed, -1)
        return joint if project is None else project(own_c, w, joint)

    return dataclasses.replace(graph, project_weights=lambda c: own | before(c), project=projected)
