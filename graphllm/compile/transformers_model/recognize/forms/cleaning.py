"""Cleaning: calls that change nothing go, calls that say the same in several ways get one form, equal calls become one.

The forms that later steps know: `to.dtype` is the only cast; `reshape` with -1 for the tokens the only change of
shape; parts of a dimension are `slice`, single entries `select`, with dimensions and bounds that are not negative.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from graphllm.compile.transformers_model.recognize.draft import (
    Draft,
    args_of,
    argument,
    aten,
    extents,
    is_tensor,
    value,
)
from graphllm.rewrite import only_user

_SAME = (
    aten.alias.default, aten.contiguous.default, aten.clone.default, aten.detach.default, aten.lift_fresh.default,
    aten.view_as.default,
)  # fmt: skip
_CASTS = (aten.to.dtype, aten.to.other, aten.type_as.default, aten._to_copy.default, aten.to.dtype_layout)
_RESHAPES = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.squeeze.dim, aten.squeeze.default,
)  # fmt: skip
_ROUNDED_ONCE = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default)
_PARTS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.unbind.int)


def clean(draft: Draft) -> None:
    """Bring a graph to the forms above."""
    for node in list(draft.graph.nodes):
        if node.op != "call_function":
            continue
        change = _rule(node)
        made = change(draft, node) if change else None
        if made is not None:
            draft.replace(node, made)
    draft.drop_unread()
    _join_equal(draft)


def _rule(node: Node) -> Callable[[Draft, Node], Node | None] | None:
    target = node.target
    if target in _SAME:
        return lambda draft, n: args_of(n)[0] if extents(n) == extents(args_of(n)[0]) else None
    if target in (aten.dropout.default, aten.native_dropout.default):
        return lambda draft, n: args_of(n)[0] if not args_of(n)[2] or args_of(n)[1] == 0 else None
    return _RULES.get(target)


def _cast(draft: Draft, node: Node) -> Node | None:
    """A cast as to.dtype; one to the dtype that the value has is none."""
    x: Any = args_of(node)[0]
    if value(x).dtype == value(node).dtype:
        return x
    if x.op == "call_function" and x.target is aten.to.dtype and _holds(value(x).dtype, value(args_of(x)[0]).dtype):
        x = args_of(x)[0]  # a wider number in between changes nothing
        if value(x).dtype == value(node).dtype:
            return x
    if (made := _computed_narrow(draft, node, x)) is not None:
        return made
    return draft.insert(node, aten.to.dtype, x, value(node).dtype)


def _computed_narrow(draft: Draft, node: Node, x: Node) -> Node | None:
    """One sum or product of widened numbers that is rounded at once, in their own dtype: that rounds once, too."""
    if x.target not in _ROUNDED_ONCE or only_user(x) is not node or x.kwargs:
        return None
    operands: list[Any] = []
    for a in args_of(x):
        if isinstance(a, Node):
            if a.target is not aten.to.dtype or not _holds(value(a).dtype, value(args_of(a)[0]).dtype):
                return None
            a = args_of(a)[0]
        operands.append(a)
    same = all(value(a).dtype == value(node).dtype for a in operands if isinstance(a, Node))
    return draft.insert(node, x.target, *operands) if same else None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of one dtype is one of the other. bfloat16 stands for the model's, which may be float16."""
    return wide == torch.float32 and narrow == torch.bfloat16


def _reshape(draft: Draft, node: Node) -> Node | None:
    """A reshape to plain sizes, of what is not one itself."""
    x: Any = args_of(node)[0]
    while x.op == "call_function" and x.target in (aten.reshape.default, aten.unsqueeze.default):
        x = args_of(x)[0]
    shape = value(node).shape
    if extents(x) == extents(node):
        return x
    sizes = sizes_of(shape)
    first, *said = args_of(node)
    if sizes is None or (node.target is aten.reshape.default and x is first and list(said[0]) == sizes):
        return None
    return draft.insert(node, aten.reshape.default, x, sizes)


def sizes_of(shape: torch.Size) -> list[int] | None:
    """A shape as a reshape takes it, with -1 for the size that depends on the tokens; None where several do."""
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return sizes if sizes.count(-1) <= 1 else None


def _slice(draft: Draft, node: Node) -> Node | None:
    x: Any = args_of(node)[0]
    dim, start, stop = (argument(node, i, n, d) for i, n, d in ((1, "dim", 0), (2, "start", None), (3, "end", None)))
    step = argument(node, 4, "step", 1)
    dim %= value(x).dim()
    size = value(x).shape[dim]
    if not isinstance(size, int):
        return x if start in (None, 0) and stop in (None, 2**63 - 1) and step == 1 else None
    start, stop, _ = slice(start, stop).indices(size)
    if (start, stop, step) == (0, size, 1):
        return x
    if step == 1 and (part := _part_of(x, dim)) is not None:
        x, first = part
        start, stop = start + first, stop + first
    wanted = (dim, start, stop) if step == 1 else (dim, start, stop, step)
    if (inner := _in_fewer(x, dim)) is not None:
        narrow, at = inner
        cut = draft.insert(node, aten.slice.Tensor, narrow, at, *wanted[1:])
        cut = _slice(draft, cut) or cut
        if x.target is aten.unsqueeze.default:
            return draft.insert(node, aten.unsqueeze.default, cut, args_of(x)[1])
        sizes = sizes_of(value(node).shape)
        return None if sizes is None else draft.insert(node, aten.reshape.default, cut, sizes)
    return None if args_of(node) == (x, *wanted) else draft.insert(node, aten.slice.Tensor, x, *wanted)


def _in_fewer(x: Node, dim: int) -> tuple[Node, int] | None:
    """The value, and its dimension, that one with other dimensions of size one, or a reshape that leaves the last one,
    has these entries of."""
    if x.op != "call_function" or x.target not in (aten.unsqueeze.default, aten.reshape.default):
        return None
    under: Any = args_of(x)[0]
    if x.target is aten.unsqueeze.default:
        return None if dim == args_of(x)[1] else (under, dim - (dim > args_of(x)[1]))
    same = dim == value(x).dim() - 1 and extents(x)[-1] == extents(under)[-1]
    return (under, value(under).dim() - 1) if same else None


def _part_of(x: Node, dim: int) -> tuple[Node, int] | None:
    """What a slice is cut out of, and where it begins there."""
    if x.op != "call_function" or x.target is not aten.slice.Tensor or len(args_of(x)) != 4 or args_of(x)[1] != dim:
        return None
    return args_of(x)[0], args_of(x)[2]


def _element(draft: Draft, node: Node) -> Node | None:
    """An entry of a list of parts, as a part."""
    parts, index = args_of(node)
    if not isinstance(parts, Node) or parts.op != "call_function" or parts.target not in _PARTS:
        return None
    x: Any = args_of(parts)[0]
    by_number = parts.target is aten.unbind.int
    dim = argument(parts, 1 if by_number else 2, "dim", 0) % value(x).dim()
    if by_number:
        return draft.insert(node, aten.select.int, x, dim, index)
    sizes = [v.shape[dim] for v in parts.meta["val"]]
    if not all(isinstance(s, int) for s in sizes):
        return None
    start = sum(sizes[:index])
    part = draft.insert(node, aten.slice.Tensor, x, dim, start, start + sizes[index])
    return _slice(draft, part) or part


def _select(draft: Draft, node: Node) -> Node | None:
    x, dim, index = args_of(node)
    at = dim % value(x).dim()
    size = value(x).shape[at]
    index = index % size if isinstance(size, int) and isinstance(index, int) else index
    if at == 1 and x.target is aten.reshape.default and isinstance(index, int):
        rows, width = args_of(x)[0], extents(x)[-1]
        if value(x).dim() == 3 and value(rows).dim() == 2 and extents(rows)[0] == extents(x)[0]:
            return draft.insert(node, aten.slice.Tensor, rows, 1, index * width, (index + 1) * width)
    return None if (at, index) == args_of(node)[1:] else draft.insert(node, aten.select.int, x, at, index)


def _transpose(draft: Draft, node: Node) -> Node | None:
    x, a, b = args_of(node)
    rank = value(x).dim()
    low, high = sorted((a % rank, b % rank))
    if low == high:
        return x
    inner: Any = x
    if inner.op == "call_function" and inner.target is aten.transpose.int and args_of(inner)[1:] == (low, high):
        return args_of(inner)[0]
    return None if (low, high) == (a, b) else draft.insert(node, aten.transpose.int, x, low, high)


def _permute(draft: Draft, node: Node) -> Node | None:
    x, dims = args_of(node)
    order = [d % len(dims) for d in dims]
    moved = [i for i, d in enumerate(order) if d != i]
    if not moved:
        return x
    if len(moved) != 2:
        return None
    made = draft.insert(node, aten.transpose.int, x, *moved)
    return _transpose(draft, made) or made


def _entries(draft: Draft, node: Node) -> Node | None:
    """A parameter is broadcast over leading dimensions without a dimension of its own for them."""
    for operand in node.all_input_nodes:
        whole = operand.op == "call_function" and operand.target is aten.unsqueeze.default and args_of(operand)[1] == 0
        if whole and draft.weight_of(args_of(operand)[0]) is not None and value(operand).dim() == value(node).dim():
            node.replace_input_with(operand, args_of(operand)[0])
    return None


def _times(draft: Draft, node: Node) -> Node | None:
    """A factor of 1 changes nothing."""
    for x, factor in (args_of(node), args_of(node)[::-1]):
        if not isinstance(factor, Node) and factor == 1 and is_tensor(x) and _alike(x, node):
            return x
    return _entries(draft, node)


def _divided(draft: Draft, node: Node) -> Node | None:
    x, factor = args_of(node)[:2]
    return x if not isinstance(factor, Node) and factor == 1 and _alike(x, node) else None


def _plus(draft: Draft, node: Node) -> Node | None:
    for x, term in (args_of(node), args_of(node)[::-1]):
        if not isinstance(term, Node) and term == 0 and is_tensor(x) and _alike(x, node):
            return x
    return None


def _joined(draft: Draft, node: Node) -> Node | None:
    """Parts without entries are none."""
    parts: Any = args_of(node)[0]
    dim = argument(node, 1, "dim", 0) % value(node).dim()
    kept = [p for p in parts if not (isinstance(value(p).shape[dim], int) and value(p).shape[dim] == 0)]
    if len(kept) == 1:
        return kept[0]
    return (
        None
        if len(kept) == len(parts) and argument(node, 1, "dim", 0) == dim
        else draft.insert(node, aten.cat.default, kept, dim)
    )


def _unsqueezed(draft: Draft, node: Node) -> Node | None:
    x, dim = args_of(node)
    at = dim % value(node).dim()
    return None if at == dim else draft.insert(node, aten.unsqueeze.default, x, at)


def _expanded(draft: Draft, node: Node) -> Node | None:
    x: Any = args_of(node)[0]
    return x if extents(x) == extents(node) else None


def _alike(x: Any, node: Node) -> bool:
    return is_tensor(x) and value(x).dtype == value(node).dtype and extents(x) == extents(node)


_RULES: dict[Any, Callable[[Draft, Node], Node | None]] = {
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_RESHAPES, _reshape),
    aten.slice.Tensor: _slice,
    operator.getitem: _element,
    aten.select.int: _select,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.mul.Tensor: _times,
    aten.mul.Scalar: _times,
    aten.div.Tensor: _divided,
    aten.add.Tensor: _plus,
    aten.cat.default: _joined,
    aten.unsqueeze.default: _unsqueezed,
    aten.expand.default: _expanded,
}


def _join_equal(draft: Draft) -> None:
    """One call in place of equal ones. All calls of a traced layer are pure, attention reads its own."""
    seen: dict[str, Node] = {}
    for node in list(draft.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or (schema is not None and schema.is_mutable):
            continue
        key = repr((str(node.target), args_of(node), sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            draft.replace(node, first)
    draft.drop_unread()
