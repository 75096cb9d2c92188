"""The written forms of an IR graph: canonical JSON and readable text.

The canonical JSON of a graph is its identity: pieces are deduplicated by its hash, and the eager backend interprets it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphllm.ir.graph import GraphError, Shapes, TensorSpec, target_name, target_of


def to_json(graph: torch.fx.Graph, shapes: Shapes) -> dict[str, Any]:
    """Canonical form of a piece: values are numbered in order, inputs and outputs ("made") carry their specs; equal
    pieces give equal JSON. The output node's fake values must be set."""
    number = {node: i for i, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return {"v": number[value]}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise GraphError(f"an argument of type {type(value).__name__} has no place in the IR: {value!r}")

    inputs, nodes, outputs, made = [], [], [], []
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(_spec_json(shapes.spec(node.meta["val"])))
        elif node.op == "output":
            outputs = plain(node.args[0])
            made = [_spec_json(shapes.spec(v)) for v in node.meta["val"]]
        else:
            nodes.append([target_name(node.target), plain(node.args), {k: plain(v) for k, v in node.kwargs.items()}])
    return {"inputs": inputs, "nodes": nodes, "outputs": outputs, "made": made}


def argument_of(item: Any, values: Sequence[Any]) -> Any:
    """An argument of a canonical form, with ``values`` in the places of their numbers."""
    if isinstance(item, dict):
        if "v" in item:
            return values[item["v"]]
        ((kind, name),) = item.items()
        return torch.device(name) if kind == "device" else getattr(torch, name)
    return [argument_of(v, values) for v in item] if isinstance(item, list) else item


def from_json(data: Mapping[str, Any]) -> torch.fx.Graph:
    """The graph of a canonical form, without fake values."""
    graph = torch.fx.Graph()
    values: list[torch.fx.Node] = [graph.placeholder(f"p{i}") for i in range(len(data["inputs"]))]
    for target, args, kwargs in data["nodes"]:
        given = {k: argument_of(v, values) for k, v in kwargs.items()}
        values.append(graph.call_function(target_of(target), tuple(argument_of(args, values)), given))
    graph.output(tuple(argument_of(v, values) for v in data["outputs"]))
    return graph


def input_specs(data: Mapping[str, Any]) -> list[TensorSpec]:
    """The specs of a canonical form's inputs."""
    return [TensorSpec(dtype, tuple(shape), tuple(stride)) for dtype, shape, stride in data["inputs"]]


def _spec_json(spec: TensorSpec) -> list[Any]:
    return [spec.dtype, list(spec.shape), list(spec.stride)]


def digest(data: Any) -> str:
    """SHA-256 over canonical JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def to_text(graph: torch.fx.Graph, shapes: Shapes, title: str) -> str:
    """Readable IR: one line a value, ``name: spec = op(arguments)``."""
    lines = [f"# {title}"]

    def show(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return f"%{value.name}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(show, value))}]"
        return str(value)

    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {show(node.args[0])}")
            continue
        spec = describe(node.meta.get("val"), shapes)
        if node.op == "placeholder":
            label = f" ({node.meta['label']})" if "label" in node.meta else ""
            lines.append(f"input %{node.name}{label}: {spec}")
            continue
        arguments = [show(a) for a in node.args] + [f"{k}={show(v)}" for k, v in node.kwargs.items()]
        lines.append(f"%{node.name}: {spec} = {target_name(node.target)}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def describe(value: Any, shapes: Shapes) -> str:
    """A node's value for people."""
    if isinstance(value, FakeTensor):
        return str(shapes.spec(value))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(describe(v, shapes) for v in value)})"
    return "int" if isinstance(value, (int, torch.SymInt)) else type(value).__name__
