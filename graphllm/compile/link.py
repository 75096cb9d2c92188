"""Link each graph's units into whole programs, cut them at boundary ops, and keep each distinct piece once.

Layers are copied, not traced again, so this costs milliseconds at any depth. Cutting the linked graph at attention
makes the repeated piece "rest of layer i, start of layer i+1": norms and residuals meet inside it, across the layer
edge. A layer without a boundary op ends a piece, too: else all such layers would be one piece, and the time to compile
it would grow with their number.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from graphllm.compile.layout import Layout
from graphllm.compile.rewrites.contracts import Body, LinkedPass
from graphllm.compile.rewrites.variants import without_optional
from graphllm.compile.trace import Program, TracedGraph
from graphllm.config import CompileConfig
from graphllm.ir.graph import GraphError, Shapes, copy_nodes
from graphllm.ir.graph_form import digest, to_json
from graphllm.ir.op import op_of
from graphllm.program.program import ProgramCall
from graphllm.program.schema import NEUTRAL
from graphllm.rewrite import Unit, results_of


class Piece(NamedTuple):
    """A graph that is compiled once for each bucket. id: content hash. boundary: it is one boundary op."""

    id: str
    graph: torch.fx.Graph
    json: dict[str, Any]
    boundary: bool
    label: str


class CallOrder(NamedTuple):
    """A program before its memory is planned; `GraphProgram` has the same fields."""

    calls: tuple[ProgramCall, ...]
    parts: dict[str, int]
    results: tuple[str, ...]


class Linked(NamedTuple):
    """The whole model.

    pieces: the distinct ones by id.
    programs: of each graph, by name.
    optional: of each graph, the inputs without which its programs exist a second time, with `NEUTRAL` appended to
        their names.
    """

    pieces: dict[str, Piece]
    programs: list[dict[str, CallOrder]]
    optional: list[list[str]]

    def pieces_of(self, graph: int) -> list[Piece]:
        """The distinct pieces of a graph's programs."""
        used = dict.fromkeys(c.piece for program in self.programs[graph].values() for c in program.calls)
        return [self.pieces[id] for id in used]


def link(
    graphs: Sequence[TracedGraph], layout: Layout, config: CompileConfig, passes: Sequence[LinkedPass] = ()
) -> Linked:
    """Chain the units of every program, run the passes over each, and cut at boundaries."""
    pieces: dict[str, Piece] = {}
    programs: list[dict[str, CallOrder]] = []
    optional: list[list[str]] = []
    for number, graph in enumerate(graphs):
        left_out, second = without_optional(graph)
        optional.append(left_out)
        versions = {"": graph, NEUTRAL: second} if left_out else {"": graph}
        programs.append(
            {
                name + suffix: _Chain(version, layout, number).program(program, pieces, config, passes)
                for suffix, version in versions.items()
                for name, program in version.programs.items()
            }
        )
    return Linked(pieces, programs, optional)


class _Chain:
    """One graph's units as one program."""

    def __init__(self, graph: TracedGraph, layout: Layout, number: int) -> None:
        self._graph, self._prefix = graph, graph.graph.prefix
        self._states, self._groups = layout.layers[number], layout.groups[number]
        self._whole = torch.fx.Graph()
        self._values: dict[str, torch.fx.Node] = {}
        self._body: Body = []

    def program(
        self, program: Program, pieces: dict[str, Piece], config: CompileConfig, passes: Sequence[LinkedPass]
    ) -> CallOrder:
        units = self._graph.units
        for name in program.units:
            if name in ("layers", "context"):
                kind = name.removesuffix("s")
                for i, layer_type in enumerate(self._graph.layer_types):
                    self.add(units[f"{kind}.{layer_type}"], f"{self._prefix}layers.{i}", i)
                    for following in self._graph.after_layer[i]:
                        self.add(units[following], self._prefix + following, None)
            else:
                self.add(units[name], self._prefix + name, None)
        begins = {units[unit].name: part for unit, part in program.parts.items()}
        results = {o.name: self._values[o.name] for o in program.results}
        shapes, body = next(iter(units.values())).shapes, self._body
        for linked_pass in passes:
            body = linked_pass(body, set(results.values()), shapes, config)
        return _cut(body, results, begins, shapes, pieces)

    def add(self, unit: Unit, owner: str, layer: int | None) -> None:
        env: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in unit.graph.find_nodes(op="placeholder"):
            label = self._global_name(node.meta["label"], owner, layer)
            if label not in self._values:
                self._values[label] = self._whole.placeholder(label.replace(".", "_"))
                self._values[label].meta.update(node.meta, label=label)
            env[node] = self._values[label]
        calls = [n for n in unit.graph.nodes if n.op == "call_function"]
        copied = copy_nodes(calls, self._whole, env)
        for node in copied:
            node.meta[_LAYER] = None if layer is None else owner
        self._body += [(unit.name, n) for n in copied]
        for name, node in zip(unit.outputs, results_of(unit), strict=True):
            self._values[name] = env[node]

    def _global_name(self, label: str, owner: str, layer: int | None) -> str:
        kind, _, name = label.partition(".")
        if kind == "w":
            return f"{owner}.{name}"
        if layer is not None and kind == "state" and name in self._states[layer]:
            return self._states[layer][name]
        if layer is not None and label == "step.block_table":
            return f"{label}.{self._groups[layer]}"
        return label


def _cut(
    body: Body,
    results: dict[str, torch.fx.Node],
    begins: dict[str, str],
    shapes: Shapes,
    pieces: dict[str, Piece],
) -> CallOrder:
    segments: list[list[tuple[str, torch.fx.Node]]] = [[]]
    placed: set[torch.fx.Node] = set()
    layer, whole = None, False  # of the node before; whether all of that layer is in one segment
    for unit, node in body:
        if (own := node.meta.get(_LAYER, layer)) != layer:
            segments += [[]] if whole else []
            layer, whole = own, own is not None
        if _is_boundary(node):
            whole = False
            several = [n for n in node.users if n.target is operator.getitem]
            segments += [[(unit, n) for n in (node, *several)], []]
            placed.update(several)
        elif node not in placed:
            segments[-1].append((unit, node))
    segments = [s for s in segments if s]

    where = {node: i for i, segment in enumerate(segments) for _, node in segment}
    names = {node: name for name, node in results.items()}
    for i, (node, _) in enumerate(where.items()):
        names.setdefault(node, f"v{i}")
    needed_after = {node: max((where[u] for u in node.users if u in where), default=-1) for node in where}

    calls: list[ProgramCall] = []
    parts: dict[str, int] = {}
    for i, segment in enumerate(segments):
        nodes = [n for _, n in segment]
        outputs = [n for n in nodes if needed_after[n] > i and not _is_size(n)]
        outputs += [n for n in nodes if n in results.values() and n not in outputs]
        piece, inputs = _piece(nodes, outputs, shapes, " + ".join(dict.fromkeys(unit for unit, _ in segment)))
        pieces.setdefault(piece.id, piece)
        if segment[0][0] in begins:
            parts.setdefault(begins[segment[0][0]], len(calls))
        names_in = tuple(n.meta["label"] if n.op == "placeholder" else names[n] for n in inputs)
        calls.append(ProgramCall(piece.id, names_in, tuple(names[n] for n in outputs)))
    return CallOrder(tuple(calls), parts, tuple(results))


_LAYER = "layer"  # of a node's meta: the layer that it was copied for; a pass that puts a node there says nothing


def _is_boundary(node: torch.fx.Node) -> bool:
    op = op_of(node.target)
    return op is not None and op.boundary


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta["val"], (int, torch.SymInt))


def _piece(
    nodes: list[torch.fx.Node], outputs: list[torch.fx.Node], shapes: Shapes, units: str
) -> tuple[Piece, list[torch.fx.Node]]:
    inside = set(nodes)
    outer = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
    inputs = [n for n in outer if not _is_size(n)]
    graph = torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    for i, node in enumerate(inputs):
        env[node] = graph.placeholder(f"p{i}")
        env[node].meta.update(val=node.meta["val"], label=node.meta.get("label", "value"))
    for node in outer:
        if _is_size(node):
            env[node] = _local_size(graph, node, env)
    copy_nodes(nodes, graph, env)
    result = graph.output(tuple(env[n] for n in outputs))
    result.meta["val"] = tuple(n.meta["val"] for n in outputs)
    boundary = _is_boundary(nodes[0])
    data = to_json(graph, shapes)
    label = nodes[0].target._schema.name.split("::")[1] if boundary else units  # type: ignore[union-attr]
    return Piece(digest(data)[:16], graph, data, boundary, label), inputs


def _local_size(graph: torch.fx.Graph, size: torch.fx.Node, env: dict[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    """The same size read off one of the piece's own inputs: sizes are not values of the program."""
    for source in list(env.values()):
        for dim, value in enumerate(source.meta["val"].shape):
            if isinstance(value, torch.SymInt) and str(value.node.expr) == str(size.meta["val"].node.expr):
                made = graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
                made.meta["val"] = size.meta["val"]
                return made
    raise GraphError(f"size {size.name} crosses a boundary and no input of the piece has it as a dimension")
