"""A traced graph over [1, T, ...] rewritten to [T, ...].

Every value of the old graph is known with the dimension of one that its new value lacks. Rules say where that dimension
goes through an op; for an op without a rule the dimension is put back before and taken away after.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node

from graphllm.compile.transformers_model import leaf_ops
from graphllm.ir.graph import Shapes, eliminate_dead
from graphllm.ops.attention.rope_table import rope_table

aten = torch.ops.aten


class Value(NamedTuple):
    """A node of the new graph. lacks: the dimension of the old value, of size one, that it is without; None: it has
    all."""

    node: Node
    lacks: int | None


class Builder:
    """A graph under construction, each of whose nodes has a fake value."""

    def __init__(self, shapes: Shapes) -> None:
        self.graph, self.shapes = Graph(), shapes

    def input(self, label: str, value: Any) -> Node:
        """A placeholder."""
        node = self.graph.placeholder(label)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call, of nodes and constants."""
        node = self.graph.call_function(target, args, kwargs)
        given = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.shapes.mode, enable_python_dispatcher(), torch.no_grad():  # else some kernels take T for a number
            node.meta["val"] = target(*given[0], **given[1])
        assert not self.shapes.fixed(), f"{node.format_node()} serves one number of tokens"
        return node


def args_of(node: Any) -> Any:
    """The positional arguments of a call."""
    return node.args


def unbatched(graph: Graph, shapes: Shapes) -> Graph:
    """The graph without its batch dimension: what goes in, apart from parameters, and what comes out has no first
    dimension. Calls that change nothing are left out. The graph writes nothing in place."""
    return _Rewriter(graph, shapes).run()


class _Rewriter:
    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        self._old, self._new = graph, Builder(shapes)
        self._values: dict[Node, Value] = {}

    def run(self) -> Graph:
        for node in self._old.nodes:
            if node.op == "placeholder":
                self._values[node] = self._input(node)
            elif node.op == "output":
                outputs = args_of(node)[0] if isinstance(args_of(node)[0], tuple | list) else (args_of(node)[0],)
                made = tuple(self._output(n) for n in outputs)
                self._new.graph.output(made).meta["val"] = None
            elif not _without_effect(node):
                self._values[node] = self._call(node)
        eliminate_dead(self._new.graph, keep_inputs=True)
        for node in list(self._new.graph.find_nodes(op="placeholder")):
            if not node.users:
                self._new.graph.erase_node(node)
        self._new.graph.lint()
        return self._new.graph

    def _input(self, node: Node) -> Value:
        value, label = node.meta["val"], str(node.target)
        if label.startswith("w.") or not isinstance(value, Tensor) or not value.dim() or value.shape[0] != 1:
            return Value(self._new.input(label, value), None)
        with self._new.shapes.mode:
            return Value(self._new.input(label, value.new_empty(value.shape[1:])), 0)

    def _output(self, node: Node) -> Node:
        value = self._values[node]
        if value.lacks == 0 or not _first_is_one(node):
            return self._whole(node) if value.lacks else value.node
        return self._new.call(aten.squeeze.dim, self._whole(node), 0)

    def _call(self, node: Node) -> Value:
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
        if node.target is operator.getitem:
            return self._result(node)
        lacking = [n for n in inputs if self._values[n].lacks is not None]
        if node.target is aten.sym_size.int:
            return self._size(node)
        return self._call_of(node, node.target, lacking)

    def _call_of(self, node: Node, target: Any, lacking: list[Node]) -> Value:
        if target in _NOTHING or (target is aten.to.dtype and _same_dtype(node)):
            return self._values[args_of(node)[0]]
        if not lacking:
            return Value(self._plain(node, target), None)
        rule = _RULES.get(target) or (_pointwise if _is_pointwise(target) else _by_schema)
        found = rule(self, node, target)
        return found if found is not None else self._with_batch(node, target)

    def _plain(self, node: Node, target: Any) -> Node:
        args, kwargs = torch.fx.map_arg((args_of(node), node.kwargs), lambda n: self._values[n].node)
        return self._new.call(target, *args, **kwargs)

    def _with_batch(self, node: Node, target: Any) -> Value:
        """The call as it was."""
        args, kwargs = torch.fx.map_arg((args_of(node), node.kwargs), self._whole)
        made = self._new.call(target, *args, **kwargs)
        return self._taken(node, made)

    def _taken(self, node: Node, made: Node) -> Value:
        """An old value without its first dimension where that is one."""
        if isinstance(node.meta["val"], Tensor) and _first_is_one(node):
            return Value(self._new.call(aten.squeeze.dim, made, 0), 0)
        return Value(made, None)

    def _whole(self, node: Node) -> Node:
        """The new node with all dimensions of the old one."""
        made, lacks = self._values[node]
        return made if lacks is None else self._new.call(aten.unsqueeze.default, made, lacks)

    def _result(self, node: Node) -> Value:
        """One of several results: they lack what the call says."""
        of, index = args_of(node)
        made, lacks = self._values[of]
        got = self._new.call(operator.getitem, made, index)
        return self._taken(node, got) if lacks is None else Value(got, lacks)

    def _size(self, node: Node) -> Value:
        of, dim = args_of(node)
        made, lacks = self._values[of]
        return Value(self._new.call(aten.sym_size.int, made, _moved(dim, lacks, _rank(of))), None)

    # What rules use.

    def value(self, node: Node) -> Value:
        return self._values[node]

    def mapped(self, args: Any) -> Any:
        return torch.fx.map_arg(args, lambda n: self._values[n].node)

    def made(self, lacks: int | None, target: Any, *args: Any, **kwargs: Any) -> Value:
        return Value(self._new.call(target, *args, **kwargs), lacks)


Rule = Callable[[_Rewriter, Node, Any], Value | None]


def _rank(node: Any) -> int:
    return len(node.meta["val"].shape)


def _first_is_one(node: Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) > 0 and isinstance(shape[0], int) and shape[0] == 1


def _without_effect(node: Node) -> bool:
    """Calls that switch a mode of torch."""
    return not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem and (
        "grad" in str(node.target) or "autocast" in str(node.target)
    )  # fmt: skip


def _moved(dim: int, lacks: int | None, rank: int) -> int:
    """A dimension of the old value, in the new one."""
    dim %= rank
    return dim - (lacks is not None and dim > lacks)


_SAME = {
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten._to_copy.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    leaf_ops.spread,
}  # fmt: skip
_NOTHING = {
    aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.dropout.default,
    aten.lift_fresh.default, aten.lift_fresh_copy.default,
}  # fmt: skip


def _is_pointwise(target: Any) -> bool:
    return target in _SAME or torch.Tag.pointwise in getattr(target, "tags", ())


def _pointwise(of: _Rewriter, node: Node, target: Any) -> Value | None:
    """Operands are aligned at their last dimensions, so what is lacked is counted from there."""
    rank, inputs = _rank(node), [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
    places = {lacks - _rank(n) for n in inputs if (lacks := of.value(n).lacks) is not None}
    if len(places) != 1:
        return None
    place = places.pop()
    new: dict[Node, Node] = {}
    for n in inputs:
        made, lacks = of.value(n)
        if lacks is None and _rank(n) >= -place:
            if n.meta["val"].shape[place] != 1:
                return None
            made = of.made(None, aten.squeeze.dim, made, _rank(n) + place).node
        new[n] = made
    args, kwargs = torch.fx.map_arg((args_of(node), node.kwargs), lambda n: new[n] if n in new else of.value(n).node)
    return of.made(rank + place, target, *args, **kwargs)


def _same_dtype(node: Node) -> bool:
    return args_of(node)[0].meta["val"].dtype == node.meta["val"].dtype


def _by_schema(of: _Rewriter, node: Node, target: Any) -> Value | None:
    """An op over one tensor and ``dim``: a reduction, a choice along a dimension, a normalization."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    named = {a.name: v for a, v in zip(schema.arguments, args_of(node), strict=False)} | dict(node.kwargs)
    defaults = {a.name: a.default_value for a in schema.arguments}
    tensors = [v for v in named.values() if isinstance(v, Node) and isinstance(v.meta["val"], Tensor)]
    if len(tensors) != 1 or "dim" not in defaults or any(isinstance(v, list | tuple) and any(
        isinstance(e, Node) for e in v) for v in named.values()):  # fmt: skip
        return None
    (x,) = tensors
    lacks = of.value(x).lacks
    dim = named.get("dim", defaults["dim"])
    if dim is None or lacks is None or target.overloadpacket not in _ALONG:
        return None
    rank, several = _rank(x), isinstance(dim, list | tuple)
    dims = [d % rank for d in (dim if several else [dim])]
    if lacks in dims or not dims:
        return None
    moved = [_moved(d, lacks, rank) for d in dims]
    named = {n: of.mapped(v) for n, v in named.items()} | {"dim": moved if several else moved[0]}
    kept = target.overloadpacket not in _REDUCING or named.get("keepdim", defaults.get("keepdim", False))
    args = tuple(named.pop(a.name) for a in schema.arguments if not a.kwarg_only and a.name in named)
    return of.made(lacks if kept else lacks - sum(d < lacks for d in dims), target, *args, **named)


_REDUCING = {
    aten.mean, aten.sum, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin, aten.var, aten.std,
    aten.linalg_vector_norm, aten.norm, aten.logsumexp, aten.any, aten.all, aten.prod,
}  # fmt: skip
_ALONG = _REDUCING | {
    aten.softmax, aten.log_softmax, aten.cumsum, aten.cumprod, aten.topk, aten.sort, aten.argsort, aten.slice,
    aten.narrow, aten.split, aten.split_with_sizes, aten.chunk, aten.glu, aten.repeat_interleave, aten._softmax,
    aten.unsafe_split, aten.unsafe_chunk, aten.tensor_split,
}  # fmt: skip


def _slice(of: _Rewriter, node: Node, target: Any) -> Value | None:
    given: tuple[Any, ...] = args_of(node)[2:]
    start, end, step = given + (None, None, 1)[len(given) :]
    whole = start in (0, None) and (end is None or (isinstance(end, int) and end >= 2**62)) and step == 1
    return of.value(args_of(node)[0]) if whole else _by_schema(of, node, target)


def _linear(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, *others = args_of(node)
    made, lacks = of.value(x)
    if lacks is None or lacks == _rank(x) - 1 or any(o is not None and of.value(o).lacks is not None for o in others):
        return None
    return of.made(lacks, target, made, *of.mapped(tuple(others)))


def _matmul(of: _Rewriter, node: Node, target: Any) -> Value | None:
    (a, b), rank = args_of(node), _rank(node)
    (made_a, lacks_a), (made_b, lacks_b) = of.value(a), of.value(b)
    places = {lacks - _rank(n) for n, lacks in ((a, lacks_a), (b, lacks_b)) if lacks is not None}
    if len(places) != 1 or (place := places.pop()) >= -2:
        return None
    if any(lacks is None and _rank(n) >= -place for n, lacks in ((a, lacks_a), (b, lacks_b))):
        return None
    return of.made(rank + place, target, made_a, made_b)


def _layer_norm(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, normalized, *_ = args_of(node)
    _, lacks = of.value(x)
    if lacks is None or lacks >= _rank(x) - len(normalized):
        return None
    return of.made(lacks, target, *of.mapped(args_of(node)), **of.mapped(node.kwargs))


def _reshape(of: _Rewriter, node: Node, target: Any) -> Value | None:
    """Any op that reads the same numbers in the same order as another shape."""
    x = args_of(node)[0]
    made, lacks = of.value(x)
    shape, old = list(node.meta["val"].shape), list(x.meta["val"].shape)
    assert lacks is not None
    before = _product(old[:lacks])
    kept = next((i for i, d in enumerate(shape) if _is_one(d) and _product(shape[:i]) == before), None)
    new = [d for i, d in enumerate(shape) if i != kept]
    if [str(d) for d in new] == [str(d) for i, d in enumerate(old) if i != lacks]:
        return Value(made, kept)
    if sum(not isinstance(d, int) for d in new) > 1:
        return None
    return of.made(kept, aten.reshape.default, made, [d if isinstance(d, int) else -1 for d in new])


def _is_one(d: Any) -> bool:
    return isinstance(d, int) and d == 1


def _product(dims: Sequence[Any]) -> str:
    made = math.prod(dims)
    return str(made if isinstance(made, int) else made.node.expr)


def _transpose(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, a, b = args_of(node)
    rank = _rank(x)
    order = list(range(rank))
    a, b = a % rank, b % rank
    order[a], order[b] = b, a
    return _ordered(of, x, order)


def _permute(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, order = args_of(node)
    return _ordered(of, x, [d % _rank(x) for d in order])


def _ordered(of: _Rewriter, x: Any, order: list[int]) -> Value:
    made, lacks = of.value(x)
    new = [_moved(d, lacks, len(order)) for d in order if d != lacks]
    place = order.index(lacks) if lacks is not None else None
    changed = [i for i, d in enumerate(new) if i != d]
    if not changed:
        return Value(made, place)
    if len(changed) == 2:
        return of.made(place, aten.transpose.int, made, *changed)
    return of.made(place, aten.permute.default, made, new)


def _unsqueeze(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, dim = args_of(node)
    made, lacks = of.value(x)
    dim %= _rank(node)
    assert lacks is not None
    place = lacks + (dim <= lacks)
    return of.made(place, target, made, dim - (dim > place))


def _squeeze(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, dim = args_of(node)
    made, lacks = of.value(x)
    rank = _rank(x)
    dims = {d % rank for d in (dim if isinstance(dim, list | tuple) else [dim])}
    gone = sorted(d for d in dims if _is_one(x.meta["val"].shape[d]))
    assert lacks is not None
    for d in reversed([g for g in gone if g != lacks]):
        made = of.made(None, aten.squeeze.dim, made, _moved(d, lacks, rank)).node
    return Value(made, None if lacks in gone else lacks - sum(d < lacks for d in gone))


def _select(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, dim, index = args_of(node)
    made, lacks = of.value(x)
    dim %= _rank(x)
    if dim == lacks:
        return Value(made, None)
    assert lacks is not None
    return of.made(lacks - (dim < lacks), target, made, _moved(dim, lacks, _rank(x)), *of.mapped((index,)))


def _unbind(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, dim = (*args_of(node), 0)[:2]
    made, lacks = of.value(x)
    dim %= _rank(x)
    if dim == lacks or lacks is None:
        return None
    return of.made(lacks - (dim < lacks), target, made, _moved(dim, lacks, _rank(x)))


def _cat(of: _Rewriter, node: Node, target: Any) -> Value | None:
    tensors, dim = (*args_of(node), 0)[:2]
    rank, stacked = _rank(tensors[0]), target is aten.stack.default
    found = [of.value(t) for t in tensors]
    lacks = found[0].lacks
    if lacks is None or any(v.lacks != lacks for v in found):
        return None
    dim %= rank + stacked
    if stacked:
        place = lacks + (dim <= lacks)
        return of.made(place, target, [v.node for v in found], dim - (dim > place))
    return None if dim == lacks else of.made(lacks, target, [v.node for v in found], _moved(dim, lacks, rank))


def _expand(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, sizes = args_of(node)[:2]
    made, lacks = of.value(x)
    assert lacks is not None
    place = lacks + len(sizes) - _rank(x)
    if not _is_one(node.meta["val"].shape[place]):
        return None
    new = [of.mapped((s,))[0] for i, s in enumerate(sizes) if i != place]
    return of.made(place, aten.expand.default, made, new)


def _pad(of: _Rewriter, node: Node, target: Any) -> Value | None:
    x, pads = args_of(node)[:2]
    _, lacks = of.value(x)
    if lacks is None or _rank(x) - lacks <= len(pads) // 2:
        return None
    return of.made(lacks, target, *of.mapped(args_of(node)), **of.mapped(node.kwargs))


def _embedding(of: _Rewriter, node: Node, target: Any) -> Value | None:
    table, ids, *_ = args_of(node)
    if of.value(table).lacks is not None:
        return None
    return of.made(of.value(ids).lacks, aten.embedding.default, *of.mapped((table, ids)))


def _attention(of: _Rewriter, node: Node, target: Any) -> Value | None:
    """Heads of keys and of values have one size in a cache: the smaller ones are filled up with zeros."""
    if any(of.value(n).lacks != 0 for n in args_of(node)[:3]):
        return None
    (q, k, v), others = of.mapped(args_of(node)[:3]), of.mapped(args_of(node)[3:])
    own, wide = v.meta["val"].shape[-1], q.meta["val"].shape[-1]
    size = max(own, wide)
    q, k, v = (_filled(of, t, size) for t in (q, k, v))
    made = of.made(0, target, q, k, v, *others, **of.mapped(node.kwargs))
    return made if own == size else of.made(0, aten.slice.Tensor, made.node, -1, 0, own)


def _filled(of: _Rewriter, heads: Node, size: int) -> Node:
    missing = size - heads.meta["val"].shape[-1]
    return of.made(None, aten.constant_pad_nd.default, heads, [0, missing]).node if missing else heads


def _rope_table(of: _Rewriter, node: Node, target: Any) -> Value | None:
    positions, *others = args_of(node)
    made, lacks = of.value(positions)
    return of.made(lacks, rope_table.overload, made, *of.mapped(tuple(others))) if lacks == 0 else None


_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _reshape),
    **dict.fromkeys((aten.flatten.using_ints, aten.unflatten.int), _reshape),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    **dict.fromkeys((aten.cat.default, aten.stack.default, aten.concat.default), _cat),
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), _layer_norm),
    **dict.fromkeys((aten.pad.default, aten.constant_pad_nd.default), _pad),
    aten.slice.Tensor: _slice,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.expand.default: _expand,
    aten.embedding.default: _embedding,
    leaf_ops.attention: _attention,
    leaf_ops.rope_table: _rope_table,
}
