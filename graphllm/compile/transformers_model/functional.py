"""A traced graph without writes in place: each such call becomes one that makes a new value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphllm.compile.transformers_model.unbatched import args_of
from graphllm.ir.graph import Shapes

aten = torch.ops.aten
_MADE = {aten.new_empty, aten.empty, aten.empty_like, aten.new_zeros, aten.zeros, aten.zeros_like}


def make_functional(graph: Graph, shapes: Shapes) -> None:
    """Rewrite the graph in place. Raises ValueError for a write that other values would see."""
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable or node not in graph.nodes:
            continue
        if node.target is aten.copy_.default and args_of(node)[0].target is aten.slice.Tensor:
            _put_together(graph, args_of(node)[0].args[0], shapes)
        else:
            _replace(node, schema)


def _put_together(graph: Graph, base: Any, shapes: Shapes) -> None:
    """A new tensor that is filled slice by slice is a concatenation."""
    if not isinstance(base, Node) or getattr(base.target, "overloadpacket", None) not in _MADE:
        raise ValueError("copy_ writes into what others read")
    copies = [c for s in base.users if s.target is aten.slice.Tensor for c in s.users if c.target is aten.copy_.default]
    slices = [args_of(c)[0] for c in copies]
    width, dims, end = base.meta["val"], {s.args[1] % base.meta["val"].dim() for s in slices}, 0
    whole = len(dims) == 1 and all(len(s.users) == 1 for s in slices)
    for s in slices:
        _, _, start, stop, *step = s.args
        size = width.shape[next(iter(dims))]
        whole = whole and start == end and not (step and step[0] != 1) and isinstance(size, int)
        end = min(stop, size) if isinstance(stop, int) and isinstance(size, int) else -1
    later = [u for u in base.users if u not in slices]
    order = list(graph.nodes)
    if (
        not whole
        or end != width.shape[next(iter(dims))]
        or any(order.index(u) < order.index(copies[-1]) for u in later)
    ):
        raise ValueError("copy_ fills a part of what others read")
    parts = []
    with graph.inserting_after(copies[-1]):
        joined = graph.call_function(aten.cat.default, ([], next(iter(dims))))
    joined.meta["val"] = base.meta["val"]
    for copy in copies:
        into, of = (n.meta["val"] for n in args_of(copy)[:2])
        parts.append(_like(graph, copy, args_of(copy)[1], into, of, shapes))
    joined.args = (parts, joined.args[1])
    base.replace_all_uses_with(joined, delete_user_cb=lambda user: user in later)
    for node in (*copies, *slices, base):
        graph.erase_node(node)


def _like(graph: Graph, before: Node, part: Any, into: Tensor, of: Tensor, shapes: Shapes) -> Node:
    """A value in the shape and dtype of what it is copied into."""
    with graph.inserting_before(before):
        if str(into.shape) != str(of.shape):
            missing = into.dim() - of.dim()
            sizes = [d if i < missing or str(of.shape[i - missing]) != str(d) else -1 for i, d in enumerate(into.shape)]
            if any(not isinstance(d, int) for d in sizes):
                raise ValueError("copy_ repeats what it copies for each token")
            part = graph.call_function(aten.expand.default, (part, sizes))
            with shapes.mode:
                part.meta["val"] = of.expand(into.shape)
        if into.dtype != of.dtype:
            part = graph.call_function(aten.to.dtype, (part, into.dtype))
            part.meta["val"] = into
    return part


def _replace(node: Node, schema: Any) -> None:
    """Put the op that makes a new value in the place of one that writes its first argument, for all that follows."""
    name, written = schema.name.split("::")[1], args_of(node)[0]
    if not name.endswith("_") or not hasattr(aten, name[:-1]) or _read_by_others(node):
        raise ValueError(f"{name} writes into what others read")
    later = set(_following(node))
    assert isinstance(written, Node)
    written.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)
    node.target = getattr(getattr(aten, name[:-1]), schema.overload_name or "default")


def _read_by_others(node: Node) -> bool:
    """Whether what a call writes in place can be read later but as its first argument: through what that is a view of,
    or another view."""
    later, written = set(_following(node)), args_of(node)[0]
    chain = [written]
    while isinstance(chain[-1], Node) and chain[-1].op == "call_function" and _is_view(chain[-1]):
        chain.append(chain[-1].args[0])
    if any(not isinstance(n, Node) or n.op != "call_function" for n in chain):
        return True
    around = [u for n in chain[1:] for u in n.users if u not in chain]
    views = [u for u in written.users if u is not node and u not in later and _is_view(u)]
    return any(u in later for u in around) or any(u in later for v in [*views, *around] if _is_view(v) for u in v.users)


def _following(node: Node) -> list[Node]:
    found, n = [], node.next
    while n.op != "root":
        found.append(n)
        n = n.next
    return found


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
