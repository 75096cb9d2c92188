"""Unit: the graph of one part of a model with what a pass needs to know of it, and the one way to replace nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphllm.config import Bucket
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ir.op import Op


class Unit(NamedTuple):
    """The traced graph of one unit: "embed", "layer.<type>", "head", or one of the sampling programs'.

    inputs and outputs name the values in order: "w.<weight>", "step.<input>", "state.<state>", "x", "shared.<i>", and
    what heads and sampling make. layers: the indices of the layers that a "layer.<type>" stands for. prefix: of a
    further graph's names. bucket is None but for a linked piece, which has inputs "p<i>" and outputs "o<i>" and fake
    values of that bucket's sizes.
    """

    name: str
    graph: torch.fx.Graph
    outputs: tuple[str, ...]
    shapes: Shapes
    bucket: Bucket | None = None
    layers: tuple[int, ...] = ()
    prefix: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the placeholders are, in order."""
        return tuple(n.meta["label"] for n in self.graph.find_nodes(op="placeholder"))

    def entries(self, weight: str) -> tuple[str, ...]:
        """The names in the weight plan of what the unit takes as "w.<weight>": one, or one for each layer."""
        owners = tuple(f"{self.prefix}layers.{i}" for i in self.layers) or (self.name,)
        return tuple(f"{owner}.{weight}" for owner in owners)

    def input(self, label: str, spec: TensorSpec, before: Node | None = None) -> Node:
        """The input of that label, such as "w.<weight>" or "step.<input>", made if there is none yet.

        before: the input that it stands before; the first node of the graph if not given.
        """
        for node in self.graph.find_nodes(op="placeholder"):
            if node.meta["label"] == label:
                return node
        with self.graph.inserting_before(before or next(iter(self.graph.nodes))):
            made = self.graph.placeholder(label.replace(".", "_"))
        made.meta.update(val=self.shapes.tensor(spec), label=label)
        return made

    def insert(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of an op's overload or of aten that stands before a node; the call."""
        with self.graph.inserting_before(before):
            made = self.graph.call_function(target, args, kwargs)
        with self.shapes.mode, torch.no_grad():
            made.meta["val"] = target(*fake_values(args), **fake_values(kwargs))
        return made

    def replace(self, node: Node | Sequence[Node], op: Op, **arguments: Any) -> Node:
        """Put a call of the op where a node is, for everything that reads the node; the call.

        arguments: by parameter name, nodes of the graph for tensors. An op with several results takes the place of as
        many nodes, given in the order of the results; the call stands where the first of them stood.
        """
        old = [node] if isinstance(node, Node) else list(node)
        with self.graph.inserting_before(old[0]):
            made = self.graph.call_function(op.overload, kwargs=arguments)
            several = [] if isinstance(node, Node) else range(len(old))
            results = [self.graph.call_function(operator.getitem, (made, i)) for i in several] or [made]
        with self.shapes.mode, torch.no_grad():
            made.meta["val"] = op.overload(**fake_values(arguments))
        for i, result in enumerate(results):
            if result is not made:
                result.meta["val"] = made.meta["val"][i]
            old[i].replace_all_uses_with(result)
        for gone in old:
            self.graph.erase_node(gone)
        return made


def fake_values(arguments: Any) -> Any:
    """The same arguments with fake values in place of nodes."""
    return torch.fx.map_arg(arguments, lambda n: n.meta["val"])


def results_of(unit: Unit) -> list[Node]:
    """The nodes a unit returns, in the order of ``outputs``."""
    returned: Any = unit.graph.output_node().args[0]
    return list(returned)
