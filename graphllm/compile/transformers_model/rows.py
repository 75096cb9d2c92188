"""Tokens: a graph in which they meet only in attention, and the same graph over chosen rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphllm.compile.transformers_model.unbatched import Builder, args_of
from graphllm.ir.graph import Shapes

aten = torch.ops.aten
# Ops along a dimension, which leave its size as it is.
_ALONG = {
    aten.cumsum, aten.cumprod, aten.sort, aten.argsort, aten.softmax, aten._softmax, aten.log_softmax, aten.flip,
    aten.roll, aten.cummax, aten.cummin, aten.logcumsumexp,
}  # fmt: skip


def mixing(graph: Graph, shapes: Shapes) -> str | None:
    """The first call, apart from attention, that may have one token's numbers depend on another's; None if there is
    none. graph: over [T, ...]."""
    T = str(shapes.symbols["T"].node.expr)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        made = _tensors(node.meta["val"])
        read = [v for n in node.all_input_nodes for v in _tensors(n.meta["val"])]
        if not made or node.target in (aten.sym_size.int,):
            continue
        if any(len(_rows(v, T)) > 1 for v in made) or any(_odd(d, T) for v in made for d in v.shape):
            return _said(node)
        if any(_rows(v, T) for v in read) and not any(_rows(v, T) for v in made):
            return _said(node)
        if getattr(node.target, "overloadpacket", None) in _ALONG and _along_rows(node, T):
            return _said(node)
    return None


def over_rows(graph: Graph, shapes: Shapes) -> Graph | None:
    """The graph over the rows of x that the input logits_indices names: x [T, D] makes results of R rows. None where
    it reads something else of each token."""
    built, env = Builder(shapes), dict[Node, Any]()
    with shapes.mode:
        rows = torch.zeros(shapes.symbols["R"], dtype=torch.int32)
    inputs = graph.find_nodes(op="placeholder")
    if any(not n.target.startswith("w.") and n.target != "x" for n in inputs):
        return None
    env = {n: built.input(n.target, n.meta["val"]) for n in inputs}
    indices = built.input("in.logits_indices", rows)
    for n in inputs:
        if n.target == "x":
            env[n] = built.call(aten.index_select.default, env[n], 0, indices)
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((args_of(node), node.kwargs), env.__getitem__)
            env[node] = built.call(node.target, *args, **kwargs)
        elif node.op == "output":
            built.graph.output(torch.fx.map_arg(args_of(node)[0], env.__getitem__)).meta["val"] = None
    return built.graph


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, tuple | list) else []


def _rows(value: Tensor, T: str) -> list[int]:
    """The dimensions that count tokens."""
    return [i for i, d in enumerate(value.shape) if T in str(d)]


def _odd(dim: Any, T: str) -> bool:
    """Whether it is a size over the number of tokens, but no multiple of it."""
    if isinstance(dim, int):
        return False
    found = dim.node.expr.as_coefficients_dict()
    return len(found) != 1 or str(next(iter(found))) != T


def _along_rows(node: Node, T: str) -> bool:
    target: Any = node.target
    schema = target._schema
    named = {a.name: v for a, v in zip(schema.arguments, args_of(node), strict=False)} | dict(node.kwargs)
    value = args_of(node)[0].meta["val"]
    dims = named.get("dim", named.get("dims", -1))
    return any(d % value.dim() in _rows(value, T) for d in (dims if isinstance(dims, list | tuple) else [dims]))


def _said(node: Node) -> str:
    return f"{node.target} of {', '.join(str(list(v.shape)) for v in _tensors(args_of(node)[0].meta['val']))}" if (
        args_of(node) and isinstance(args_of(node)[0], Node)
    ) else str(node.target)  # fmt: skip
