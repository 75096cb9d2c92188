"""Adoption: a config.json as the recipes of all units of its model."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.checkpoint.stored import StoredWeights
from graphllm.compile.transformers_model.experts.leaf import with_experts
from graphllm.compile.transformers_model.experts.routing import with_routing
from graphllm.compile.transformers_model.functional import make_functional
from graphllm.compile.transformers_model.local import local
from graphllm.compile.transformers_model.positions import are_looked_up, count_from, first_position
from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.compile.transformers_model.recognize import recognized
from graphllm.compile.transformers_model.refusal import refused
from graphllm.compile.transformers_model.rows import mixing, over_rows
from graphllm.compile.transformers_model.source import Source, open_source
from graphllm.compile.transformers_model.tracing import Outer, Tracer, layer_call
from graphllm.compile.transformers_model.unbatched import args_of, unbatched
from graphllm.config.fields import MAX_MODEL_LEN
from graphllm.ir import Weight
from graphllm.ir.graph import Shapes, eliminate_dead
from graphllm.ops.attention.paged_attention import kv_state
from graphllm.program.specs import StateSpec
from graphllm.weights.plan.expr import Read, Slice

_MOST_NUMBERS = 1 << 20  # of a computed buffer


class Adopted(NamedTuple):
    """A model of transformers as recipes.

    name: of its class. layers: by layer type. layer_types: of each layer. vocabulary: the width of logits. max_len: see
    `FamilyConfig`.
    shapes: the symbols of all graphs.
    """

    name: str
    embed: Recipe
    layers: dict[str, Recipe]
    head: Recipe
    layer_types: tuple[str, ...]
    vocabulary: int
    max_len: int
    shapes: Shapes

    def states(self, layer_type: str) -> tuple[StateSpec, ...]:
        """What a layer of a type remembers."""
        return _states(self.layers[layer_type].graph)


@functools.lru_cache(maxsize=4)
def adopt(text: str, longest: int) -> Adopted:
    """The recipes of a config.json. text: its JSON. longest: the longest context that is compiled for, in tokens.
    Raises ConfigError, which says what blocks it, for a model that is not traced."""
    source = open_source({**json.loads(text), MAX_MODEL_LEN: longest})
    plan: dict[str, str] = dict(getattr(source.model, "_tp_plan", None) or {})
    model, stored = _Adoption(source, lambda recipe: recognized(recipe, plan)).run(), StoredWeights(source.model)
    return model._replace(
        embed=stored.of_recipe(model.embed),
        layers={name: stored.of_recipe(r, model.layer_types.index(name)) for name, r in model.layers.items()},
        head=stored.of_recipe(model.head),
    )


def traced(text: str, longest: int) -> Adopted:
    """The same as traced: without our ops, and with weights by the names of the model's parameters; see `adopt`."""
    return _Adoption(open_source({**json.loads(text), MAX_MODEL_LEN: longest}), lambda recipe: recipe).run()


@functools.lru_cache(maxsize=4)
def adopt_share(text: str, longest: int, degree: int, experts_apart: bool) -> Adopted:
    """The recipes of one of ``degree`` tensor-parallel ranks; see `adopt`. experts_apart: experts are divided by
    number."""
    whole = adopt(text, longest)
    if degree == 1:
        return whole
    return whole._replace(
        embed=local(whole.embed, whole.shapes, degree, experts_apart),
        layers={n: local(recipe, whole.shapes, degree, experts_apart) for n, recipe in whole.layers.items()},
        head=local(whole.head, whole.shapes, degree, experts_apart),
    )


class _Adoption:
    """finish: what is done to each recipe once it is traced."""

    def __init__(self, source: Source, finish: Callable[[Recipe], Recipe]) -> None:
        self._source, self._tracer, self._finish = source, Tracer(source), finish
        self._name = type(source.model).__name__
        self._shared: list[Node] = []  # nodes of the outer graph that layers read of embed

    def run(self) -> Adopted:
        outer = self._tracer.outer()
        if are_looked_up(outer.graph):
            first = first_position(outer.graph, self._tracer.outer(counts=True).graph, outer.values)
            if first is None:
                raise refused(self._name, "positions that depend on more than a token's place in its sequence")
            if first:
                count_from(outer.graph, first)
        calls = self._chain(outer.graph)
        kinds, layer_types = self._kinds(calls)
        names = self._named(kinds, layer_types, calls)
        embed = self._embed(outer, calls[0])
        head = self._head(outer, calls[-1], embed)
        config = self._source.config.get_text_config()
        return Adopted(
            name=self._name,
            embed=embed,
            layers={names[k]: recipe for k, recipe in enumerate(kinds)},
            head=head,
            layer_types=tuple(names[k] for k in layer_types),
            vocabulary=_width(head.graph),
            max_len=getattr(config, "max_position_embeddings", None) or self._source.longest,
            shapes=self._tracer.shapes,
        )

    def _chain(self, graph: Graph) -> list[Node]:
        """The calls of layers, each of which reads what the one before it made. Raises ConfigError for others."""
        calls = graph.find_nodes(op="call_function", target=layer_call)
        calls = sorted(calls, key=list(graph.nodes).index)
        if [args_of(c)[2] for c in calls] != list(range(len(self._source.layers))):
            raise refused(self._name, "layers that do not run once each, in order")
        for before, call in itertools.pairwise(calls):
            if args_of(call)[0] is not before:
                raise refused(self._name, "code between its layers")
        return calls

    def _kinds(self, calls: Sequence[Node]) -> tuple[list[Recipe], list[int]]:
        """A recipe of each kind of layer, and the kind of each layer."""
        found: dict[Any, list[int]] = {}
        for i, call in enumerate(calls):
            found.setdefault((self._tracer.fingerprint(i), tuple(args_of(call)[1])), []).append(i)
        kinds: list[Recipe] = []
        of: dict[int, int] = {}
        for indices in found.values():
            own = [self._layer(i, calls[i]) for i in dict.fromkeys((indices[0], indices[-1]))]
            if len(own) == 2 and str(own[0].graph) != str(own[1].graph):  # it depends on its index
                own = [self._layer(i, calls[i]) for i in indices]
                of |= {i: len(kinds) + n for n, i in enumerate(indices)}
                kinds += own
                continue
            of |= dict.fromkeys(indices, len(kinds))
            kinds.append(own[0])
        return kinds, [of[i] for i in range(len(calls))]

    def _layer(self, index: int, call: Node) -> Recipe:
        others: Sequence[Node] = args_of(call)[1]
        given = [args_of(call)[0].meta["val"], *(n.meta["val"] for n in others)]
        traced = self._tracer.layer(index, given)
        graph = traced.graph
        for node in list(graph.find_nodes(op="placeholder")):
            if node.target.startswith("given.") and node.users:
                self._take(graph, node, others[int(node.target.removeprefix("given."))])
        name = type(self._source.layers[index]).__name__
        graph = self._unbatched(graph, name)
        if said := mixing(graph, self._tracer.shapes):
            raise refused(name, f"code outside of transformers' attention interface that has tokens meet: {said}")
        prefix = f"{self._source.path}.{{layer}}."
        return _left_alone(self._recipe(graph, traced.values, prefix, {}), traced.unread, prefix)

    def _take(self, graph: Graph, node: Node, outer: Node) -> None:
        """Have a layer read what embed hands on in place of a further argument of its call."""
        if outer.op == "placeholder":
            node.target = outer.target
            return
        handed = args_of(outer)[0] if outer.target is leaf_ops.spread else outer
        assert isinstance(handed, Node)
        if handed not in self._shared:
            self._shared.append(handed)
        node.target = f"shared.{self._shared.index(handed)}"
        if handed is outer:
            return
        node.meta["val"], full = handed.meta["val"], node.meta["val"]
        with graph.inserting_before(_first_call(graph)):
            spread = graph.call_function(leaf_ops.spread, (node, *args_of(outer)[1:]))
        spread.meta["val"] = full
        node.replace_all_uses_with(spread, delete_user_cb=lambda user: user is not spread)

    def _embed(self, outer: Outer, first: Node) -> Recipe:
        graph = _until(outer.graph, [args_of(first)[0], *self._shared])
        return self._recipe(self._unbatched(graph, self._name), outer.values, "", {})

    def _head(self, outer: Outer, last: Node, embed: Recipe) -> Recipe:
        graph = self._unbatched(_after(outer.graph, last), self._name)
        if said := mixing(graph, self._tracer.shapes):
            raise refused(self._name, f"code after its layers that has tokens meet: {said}")
        rows = over_rows(graph, self._tracer.shapes)
        if rows is None:
            raise refused(self._name, "code after its layers that reads more than their result")
        tied = {str(w.sources[0]): f"embed.{n}" for n, w in embed.weights.items() if w.sources}
        return _left_alone(self._recipe(rows, outer.values, "", tied), outer.unread, "")

    def _unbatched(self, graph: Graph, name: str) -> Graph:
        try:
            make_functional(graph, self._tracer.shapes)
        except ValueError as problem:
            raise refused(name, f"code in which {problem}") from problem
        return unbatched(graph, self._tracer.shapes)

    def _recipe(self, graph: Graph, values: Mapping[str, Tensor], prefix: str, tied: Mapping[str, str]) -> Recipe:
        """A graph with its parameters. prefix: of their names in the model. tied: names of finished parameters, by the
        names of those in the model that they are."""
        weights: dict[str, Weight] = {}
        for node in graph.find_nodes(op="placeholder"):
            if not node.target.startswith("w."):
                continue
            own = node.target.removeprefix("w.")
            name = own.removesuffix(".weight").replace(".", "_")
            _as_float(graph, node)
            weights[name] = self._weight(node.meta["val"], values.get(own), prefix + own, tied)
            node.target = f"w.{name}"
        for number, node in enumerate(_attentions(graph)):
            if number:
                node.kwargs = {**node.kwargs, "state": f"kv{number}"}
        return self._finish(with_routing(with_experts(Recipe(graph, weights))))

    def _weight(self, fake: Tensor, value: Tensor | None, source: str, tied: Mapping[str, str]) -> Weight:
        dtype: Any = "float32" if fake.dtype == torch.float32 else "model"
        shape = tuple(fake.shape)
        if value is not None:
            if value.numel() > _MOST_NUMBERS:
                raise refused(self._name, f"a computed table of {value.numel():,} numbers, {source}")
            return Weight(shape or (1,), value=tuple(value.double().flatten().tolist()), dtype=dtype)
        if source in tied:
            return Weight(shape, tie=tied[source], dtype=dtype)
        return Weight(shape, (source,), dtype=dtype)

    def _named(self, kinds: Sequence[Recipe], layer_types: Sequence[int], calls: Sequence[Node]) -> list[str]:
        """A name of each kind: by its window, with a number where several have the same."""
        names: list[str] = []
        for recipe in kinds:
            windows = [s.window for s in _states(recipe.graph)]
            base = "sliding" if any(windows) else "full" if windows else "plain"
            number = sum(n.rstrip("0123456789") == base for n in names)
            names.append(base + (str(number + 1) if number else ""))
        return names


def _as_float(graph: Graph, node: Node) -> None:
    """Have a graph read whole numbers as float32, as all parameters are floating."""
    value = node.meta["val"]
    if value.dtype.is_floating_point:
        return
    node.meta["val"] = value.float()
    with graph.inserting_before(_first_call(graph)):
        whole = graph.call_function(torch.ops.aten.to.dtype, (node, value.dtype))
    whole.meta["val"] = value
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def _left_alone(recipe: Recipe, unread: Mapping[str, tuple[int, ...]], prefix: str) -> Recipe:
    """With what a checkpoint has of parameters that nothing reads, so that it fits the plan: the first row of each."""
    none = {
        f"unread_{name.replace('.', '_')}": Weight((1, *shape[1:]), expr=Slice(Read((prefix + name,), shape), 0, 0, 1))
        for name, shape in unread.items()
        if shape
    }
    return recipe._replace(weights={**recipe.weights, **none})


def _first_call(graph: Graph) -> Node:
    return next(n for n in graph.nodes if n.op != "placeholder")


def _attentions(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.target is leaf_ops.attention]


def _states(graph: Graph) -> tuple[StateSpec, ...]:
    states = []
    for node in _attentions(graph):
        names = [a.name for a in leaf_ops.attention._schema.arguments]
        given: dict[str, Any] = dict(zip(names, args_of(node), strict=False)) | node.kwargs
        K, E = given["k"].meta["val"].shape[-2:]
        states.append(replace(kv_state(K, E, given.get("window", 0)), name=given.get("state", "kv")))
    return tuple(states)


def _until(graph: Graph, results: Sequence[Node]) -> Graph:
    """A copy of what makes some nodes of a graph."""
    made, env = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node.op == "output":
            break
        env[node] = made.node_copy(node, env.__getitem__)
    made.output(tuple(env[n] for n in results))
    eliminate_dead(made)
    return made


def _after(graph: Graph, last: Node) -> Graph:
    """A copy of what a graph makes of a node."""
    made, env = Graph(), dict[Node, Node]()
    env[last] = made.placeholder("x")
    env[last].meta["val"] = last.meta["val"]
    for node in graph.nodes:
        if node.target is layer_call:
            continue
        if node.op == "output":
            made.output(tuple(env[n] for n in _flat(args_of(node)[0])))
            continue
        if all(n in env for n in node.all_input_nodes):
            env[node] = made.node_copy(node, env.__getitem__)
    eliminate_dead(made)
    return made


def _width(graph: Graph) -> int:
    """The size of the last dimension of what a graph makes first: of a head, how many tokens it knows."""
    return int(_flat(graph.output_node().args[0])[0].meta["val"].shape[-1])


def _flat(value: Any) -> list[Node]:
    return list(value) if isinstance(value, tuple | list) else [value]
