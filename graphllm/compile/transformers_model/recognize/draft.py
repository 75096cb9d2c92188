"""Draft: a recipe while its graph is rewritten; the one way to add nodes and parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.ir import Weight
from graphllm.ir.graph import eliminate_dead
from graphllm.ir.op import Op, op_of

aten = torch.ops.aten
WEIGHT = "w."
_CASTS = frozenset((aten.to.dtype, aten._to_copy.default))


def name_of(node: Any) -> str:
    """The weight that a placeholder is, or an empty text."""
    if not isinstance(node, Node) or node.op != "placeholder":
        return ""
    label = str(node.target)
    return label.removeprefix(WEIGHT) if label.startswith(WEIGHT) else ""


class Draft:
    """A graph, its weights, and what is said of ordinary ops. The recipe that it is made of stays as it is."""

    name_of = staticmethod(name_of)

    def __init__(self, recipe: Recipe) -> None:
        self.graph = torch.fx.Graph()
        values: dict[Node, Node] = {}
        for node in recipe.graph.nodes:
            values[node] = self.graph.node_copy(node, values.__getitem__)
        self.weights, self.notes = dict(recipe.weights), dict.fromkeys(recipe.notes)
        held = [n.meta["val"] for n in self.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        self._mode = held[0].fake_mode

    def recipe(self) -> Recipe:
        """What it has become, with the weights that are still read."""
        self.drop_unread()
        read = {self.name_of(n) for n in self.graph.find_nodes(op="placeholder")}
        self.graph.lint()
        return Recipe(self.graph, {n: w for n, w in self.weights.items() if n in read}, tuple(self.notes))

    def note(self, what: str, why: str) -> None:
        """Say that something stays an ordinary op."""
        self.notes[what, why] = None

    def calls(self, *targets: Any) -> list[Node]:
        """The calls of aten overloads or of ops, in order."""
        wanted = {t.overload if isinstance(t, Op) else t for t in targets}
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target in wanted]

    def insert(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call that stands before a node; the call. target: an op, its overload or one of aten."""
        target = target.overload if isinstance(target, Op) else target
        with self.graph.inserting_before(before):
            made = self.graph.call_function(target, args, kwargs)
        with self._mode, torch.no_grad():
            made.meta["val"] = target(*_values(args), **_values(kwargs))
        return made

    def replace(self, node: Node, by: Node) -> None:
        """Have everything that reads a node read another one."""
        node.replace_all_uses_with(by)

    def drop_unread(self) -> None:
        """Remove what nothing reads."""
        eliminate_dead(self.graph)

    def cast(self, before: Node, node: Node, dtype: torch.dtype) -> Node:
        """The value in a dtype."""
        return node if value(node).dtype == dtype else self.insert(before, aten.to.dtype, node, dtype)

    def weight_of(self, node: Any) -> Weight | None:
        """What a placeholder is, if it is a weight."""
        return self.weights.get(self.name_of(node)) if self.name_of(node) else None

    def change(self, node: Node, **fields: Any) -> None:
        """Another description of a weight."""
        self.weights[self.name_of(node)] = replace(self.weights[self.name_of(node)], **fields)

    def weight(self, name: str, made: Weight) -> Node:
        """A new parameter; its name gets a number if it is taken by another one."""
        number, wanted = 1, name
        while name in self.weights and self.weights[name] != made:
            number, name = number + 1, f"{wanted}_{number + 1}"
        for node in self.graph.find_nodes(op="placeholder"):
            if self.name_of(node) == name:
                return node
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.graph.placeholder(name.replace(".", "_"))
        node.target = WEIGHT + name
        return self.become(node, made)

    def become(self, node: Node, made: Weight) -> Node:
        """A placeholder for another weight under its name, also of other shape or dtype."""
        self.weights[self.name_of(node)] = made
        with self._mode:
            dtype = torch.float32 if made.dtype == "float32" else torch.bfloat16
            node.meta["val"] = torch.empty(made.shape, dtype=dtype)
        return node


Step = Callable[[Draft], None]


def value(node: Node) -> torch.Tensor:
    """The fake tensor of a node."""
    held = node.meta["val"]
    assert isinstance(held, torch.Tensor), f"{node.name} is no tensor"
    return held


def extents(node: Any) -> tuple[int | str, ...]:
    """The shape of a value, with text for sizes that are symbolic: comparing them adds no guard."""
    return tuple(size if isinstance(size, int) else str(size) for size in value(node).shape)


def is_tensor(node: Any) -> bool:
    """Whether an argument is a node with a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def args_of(node: Node) -> tuple[Any, ...]:
    """The arguments of a call by position."""
    return node.args


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of an aten call, given by position or by name."""
    return args_of(node)[position] if len(args_of(node)) > position else node.kwargs.get(name, default)


def own_op(node: Any) -> Op | None:
    """The op of graphllm that a node calls."""
    return op_of(node.target) if isinstance(node, Node) and node.op == "call_function" else None


def is_pointwise(node: Node) -> bool:
    """Whether each entry of a call's result depends on one entry of each operand, as broadcast."""
    return node.target in _CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def last(node: Node, dim: int) -> bool:
    """Whether a dimension of a value is its last one."""
    rank = value(node).dim()
    return dim % rank == rank - 1


def _values(arguments: Any) -> Any:
    return torch.fx.map_arg(arguments, lambda n: n.meta["val"])
