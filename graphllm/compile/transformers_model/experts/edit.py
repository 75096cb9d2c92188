"""Editor: a copy of a recipe whose nodes and weights change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.ir import Weight
from graphllm.ir.graph import eliminate_dead

aten = torch.ops.aten


@contextlib.contextmanager
def real_numbers() -> Iterator[None]:
    """Within a trace: tensors have numbers, and nothing is recorded."""
    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield


class Editor:
    """graph, weights: of the copy; the recipe itself stays as it is."""

    def __init__(self, recipe: Recipe) -> None:
        self.graph = Graph()
        values: dict[Node, Node] = {}
        for node in recipe.graph.nodes:
            values[node] = self.graph.node_copy(node, values.__getitem__)
        self.weights, self.notes = dict(recipe.weights), recipe.notes
        self._mode = next(v.fake_mode for n in self.graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor))

    def recipe(self) -> Recipe:
        """What it has become, with the weights that are still read."""
        eliminate_dead(self.graph)
        self.graph.lint()
        read = {name_of(node) for node in self.graph.find_nodes(op="placeholder")}
        return Recipe(self.graph, {n: w for n, w in self.weights.items() if n in read}, self.notes)

    def weight_of(self, node: Any) -> Weight:
        """The weight that a placeholder is."""
        return self.weights[name_of(node)]

    def change(self, node: Node, weight: Weight) -> Node:
        """The placeholder, with another description of its weight."""
        self.weights[name_of(node)] = weight
        with self._mode:
            dtype = torch.float32 if weight.dtype == "float32" else torch.bfloat16
            node.meta["val"] = torch.empty(weight.shape, dtype=dtype)
        return node

    def weight(self, name: str, weight: Weight) -> Node:
        """A new parameter, under a name that is not taken."""
        assert name not in self.weights
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.graph.placeholder(name)
        node.target = f"w.{name}"
        return self.change(node, weight)

    def insert(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call that stands before a node."""
        with self.graph.inserting_before(before):
            made = self.graph.call_function(target, args, kwargs)
        given = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode, torch.no_grad():
            made.meta["val"] = target(*given[0], **given[1])
        return made

    def cast(self, before: Node, node: Node, dtype: torch.dtype) -> Node:
        """The value in a dtype."""
        return node if node.meta["val"].dtype == dtype else self.insert(before, aten.to.dtype, node, dtype)

    def replace(self, node: Node, by: Node) -> None:
        """Have everything that reads a node read another one."""
        node.replace_all_uses_with(by)


def name_of(node: Any) -> str:
    """The name of the weight that a placeholder is; an empty text for other nodes."""
    is_weight = isinstance(node, Node) and node.op == "placeholder" and str(node.target).startswith("w.")
    return str(node.target).removeprefix("w.") if is_weight else ""
