"""A second version of each program, for steps in which no request uses an optional input (for example: no adapter). It
leaves out the ops, and the arguments of ops, that change nothing then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from graphllm.compile.trace import TracedGraph
from graphllm.ir.graph import eliminate_dead
from graphllm.ir.op import op_of
from graphllm.rewrite import Unit

_INPUT = "step."


def without_optional(graph: TracedGraph) -> tuple[list[str], TracedGraph]:
    """The inputs that are optional in all units, and the graph for steps in which they are neutral."""
    left_out = optional_inputs(graph.units.values())
    return left_out, graph._replace(units={n: without(u, left_out) for n, u in graph.units.items()})


def optional_inputs(units: Iterable[Unit]) -> list[str]:
    """The inputs that only such ops read as change nothing when the input is neutral."""
    optional: dict[str, bool] = {}
    for unit in units:
        for node in unit.graph.find_nodes(op="placeholder"):
            label = node.meta["label"]
            if label.startswith(_INPUT) and node.users:
                skipped = all(_skippable(user)[0] is node for user in node.users)
                optional[label] = optional.get(label, True) and skipped
    return [label.removeprefix(_INPUT) for label, is_optional in optional.items() if is_optional]


def without(unit: Unit, inputs: Iterable[str]) -> Unit:
    """A copy of a unit for steps in which these inputs are neutral."""
    labels = {_INPUT + name for name in inputs}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(unit.graph, {}))
    for node in list(graph.nodes):
        given, kept = _skippable(node)
        if given is None or given.meta.get("label") not in labels:
            continue
        if isinstance(kept, Node):
            node.replace_all_uses_with(kept)
        else:
            node.args, node.kwargs = (), kept
    eliminate_dead(graph)
    return unit._replace(graph=graph)


def _skippable(node: Node) -> tuple[Node | None, Any]:
    """Of a call that changes nothing, or less, when an argument is neutral: the argument, and the result in this case,
    or the arguments that are left."""
    op = op_of(node.target)
    if op is None or op.neutral is None:
        return None, None
    (name, kept), bound = op.neutral, op.bind(node.args, node.kwargs)
    if isinstance(kept, str):
        return bound[name], bound[kept]
    return bound[name], {n: v for n, v in bound.items() if n != name and n not in kept}
