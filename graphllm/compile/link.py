"""Link the units into the whole model's graph, cut it at boundary ops, and keep each distinct piece once.

Two programs come out, alike up to the logits: "plain" samples from them, "full" edits them first and reports logprobs.
Layers are copied, not traced again, so this costs milliseconds at any depth. Cutting the linked graph at attention
makes the
repeated piece "rest of layer i, start of layer i+1": norms and residuals meet inside it, across the layer edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from graphllm.ir.graph import GraphError, Shapes, copy_nodes, digest, to_json
from graphllm.ir.op import op_of
from graphllm.rewrite import Unit, results_of


class Piece(NamedTuple):
    """A graph that is compiled once for each bucket. id: content hash. boundary: holds exactly one boundary op."""

    id: str
    graph: torch.fx.Graph
    json: dict[str, Any]
    boundary: bool
    label: str


class Call(NamedTuple):
    """One run of a piece: the names of the values it reads and makes, in the piece's order."""

    piece: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Program(NamedTuple):
    """One order of calls. parts: the index of the first call of each part after the first; parts run one by one."""

    calls: list[Call]
    parts: dict[str, int]


class CacheLayout(NamedTuple):
    """Cache groups: layers with the same attention window share page lists, and all groups draw pages from one pool.

    windows: of each group, 0 sees everything. places: (group, tensor) of each layer; layers of different groups use the
    same cache tensor, in different pages of it. tensors: how many there are.
    """

    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    tensors: int


class Linked(NamedTuple):
    """The whole model: its distinct pieces by id and its programs.

    "plain" ends with "tokens" sampled from the "logits". "full" has the parts "adjust" (logits to "adjusted"), "sample"
    and "logprobs" ("scores") for steps in which a request asks for more. layout: where each layer's cache is.
    """

    pieces: dict[str, Piece]
    programs: dict[str, Program]
    layout: CacheLayout


# The units of each program after the model's own, and the parts that begin with them.
_TAILS = {"plain": ("sample",), "full": ("adjust", "sample_adjusted", "logprobs")}
_PARTS = {"adjust": "adjust", "sample_adjusted": "sample", "logprobs": "logprobs"}
_RESULTS = ("logits", "adjusted", "tokens", "scores")


def link(units: Sequence[Unit], kinds: Sequence[str], max_len: int) -> Linked:
    """Chain feed, embed, every layer, head and the sampling units, and cut at boundaries. max_len: the context's."""
    windows = {u.name: _window(u) for u in units}
    layout = cache_layout([windows[f"layer.{kind}"] for kind in kinds], max_len)
    pieces: dict[str, Piece] = {}
    programs = {name: _program(units, kinds, tail, layout, pieces) for name, tail in _TAILS.items()}
    return Linked(pieces, programs, layout)


def cache_layout(windows: Sequence[int], max_len: int) -> CacheLayout:
    """Groups of equal size over layers with those windows; the fewer layers a window has, the smaller they all are."""
    seen = [0 if w >= max_len else w for w in windows]
    layers = {w: [i for i, v in enumerate(seen) if v == w] for w in sorted(set(seen))}
    size = min(map(len, layers.values()))
    found: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for window, members in layers.items():
        for start in range(0, len(members), size):
            for tensor, layer in enumerate(members[start : start + size]):
                places[layer] = (len(found), tensor)
            found.append(window)
    return CacheLayout(tuple(found), tuple(places[i] for i in range(len(windows))), size)


def _window(unit: Unit) -> int:
    """The window of a layer's attention, as its graph says."""
    for node in unit.graph.nodes:
        op = op_of(node.target)
        if op is not None and "window" in op.signature.parameters and op.mutates:
            return int(op.bind(node.args, node.kwargs)["window"])
    return 0


def _program(
    units: Sequence[Unit], kinds: Sequence[str], tail: Sequence[str], layout: CacheLayout, pieces: dict[str, Piece]
) -> Program:
    by_name = {u.name: u for u in units}
    order = [("feed", by_name["feed"], -1), ("embed", by_name["embed"], -1)]
    order += [(f"layers.{i}", by_name[f"layer.{kind}"], i) for i, kind in enumerate(kinds)]
    order += [(name, by_name[name], -1) for name in ("head", *tail)]
    shapes = units[0].shapes

    whole = torch.fx.Graph()
    values: dict[str, torch.fx.Node] = {}
    body: list[tuple[str, torch.fx.Node]] = []
    for prefix, unit, layer in order:
        env: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in unit.graph.find_nodes(op="placeholder"):
            label = _global_name(node.meta["label"], prefix, layer, layout)
            if label not in values:
                values[label] = whole.placeholder(label.replace(".", "_"))
                values[label].meta.update(node.meta, label=label)
            env[node] = values[label]
        calls = [n for n in unit.graph.nodes if n.op == "call_function"]
        body += [(unit.name, n) for n in copy_nodes(calls, whole, env)]
        for name, node in zip(unit.outputs, results_of(unit), strict=True):
            values[name] = env[node]
    results = {name: values[name] for name in _RESULTS if name in values}
    return _cut(body, results, shapes, pieces)


def _global_name(label: str, prefix: str, layer: int, layout: CacheLayout) -> str:
    if label.startswith("w."):
        return f"{prefix}.{label[2:]}"
    if label == "kv":
        return f"kv.{layout.places[layer][1]}"
    return f"step.block_table.{layout.places[layer][0]}" if label == "step.block_table" else label


def _cut(
    body: list[tuple[str, torch.fx.Node]],
    results: dict[str, torch.fx.Node],
    shapes: Shapes,
    pieces: dict[str, Piece],
) -> Program:
    segments: list[list[tuple[str, torch.fx.Node]]] = [[]]
    for unit, node in body:
        op = op_of(node.target)
        if op is not None and op.boundary:
            segments += [[(unit, node)], []]
        else:
            segments[-1].append((unit, node))
    segments = [s for s in segments if s]

    where = {node: i for i, segment in enumerate(segments) for _, node in segment}
    names = {node: name for name, node in results.items()}
    for i, (node, _) in enumerate(where.items()):
        names.setdefault(node, f"v{i}")
    needed_after = {node: max((where[u] for u in node.users if u in where), default=-1) for node in where}

    calls: list[Call] = []
    parts: dict[str, int] = {}
    for i, segment in enumerate(segments):
        nodes = [n for _, n in segment]
        outputs = [n for n in nodes if needed_after[n] > i and not _is_size(n)]
        outputs += [n for n in nodes if n in results.values() and n not in outputs]
        piece, inputs = _piece(nodes, outputs, shapes, " + ".join(dict.fromkeys(unit for unit, _ in segment)))
        pieces.setdefault(piece.id, piece)
        if segment[0][0] in _PARTS:
            parts.setdefault(_PARTS[segment[0][0]], len(calls))
        names_in = tuple(n.meta["label"] if n.op == "placeholder" else names[n] for n in inputs)
        calls.append(Call(piece.id, names_in, tuple(names[n] for n in outputs)))
    return Program(calls, parts)


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
    boundary = len(nodes) == 1 and (op := op_of(nodes[0].target)) is not None and op.boundary
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
