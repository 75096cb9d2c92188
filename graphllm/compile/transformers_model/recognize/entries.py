"""Entries: what stands in each place of a value's last dimension, as a sum of products of entries of other values.

However a model writes a rotation (halves, pairs, slices, stacks, products by parts), its entries are the same sums, so
one comparison knows them all.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import numpy as np
from torch.fx import Node

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.recognize.draft import args_of, argument, aten, extents, is_tensor, value

Factor = tuple[Node, int]
"""An entry of a value that is not looked into."""

Product = tuple[Factor, ...]
"""Ordered by the factors' names."""

MOST_PRODUCTS = 4  # of an entry; a rotation has two


class Sum(NamedTuple):
    """Of products, each with its coefficient; ordered, without zeros."""

    terms: tuple[tuple[Product, float], ...]

    def plus(self, other: Sum) -> Sum:
        """The sum of both."""
        total = dict(self.terms)
        for product, coefficient in other.terms:
            total[product] = total.get(product, 0.0) + coefficient
        return _sum(total)

    def product(self, other: Sum) -> Sum:
        """Each term times each other one."""
        total: dict[Product, float] = {}
        for a, p in self.terms:
            for b, q in other.terms:
                product = tuple(sorted((*a, *b), key=lambda f: (f[0].name, f[1])))
                total[product] = total.get(product, 0.0) + p * q
        return _sum(total)

    def times(self, number: float) -> Sum:
        """Each coefficient times a number."""
        return _sum({product: number * c for product, c in self.terms})


def _sum(terms: dict[Product, float]) -> Sum:
    kept = {p: c for p, c in terms.items() if c}
    if len(kept) > MOST_PRODUCTS:
        raise _UnknownError
    return Sum(tuple(sorted(kept.items(), key=lambda t: [(f[0].name, f[1]) for f in t[0]])))


class _UnknownError(Exception):
    """Entries are no short sums, or cannot be counted."""


class Entries:
    """Reads the entries of values, with their results kept. turned: the values that depend on a table. A cast that
    rounds is looked through only there, where it ends a rotation."""

    def __init__(self, turned: Set[Node]) -> None:
        self.turned = turned
        self._known: dict[Node, tuple[int, np.ndarray] | None] = {}

    def of(self, node: Node) -> np.ndarray | None:
        """The sums in the places of the last dimension of [T, H, E], an array [E]; None where they are not known."""
        try:
            lead, sums = self._read(node)
        except _UnknownError:
            return None
        return sums if sums.ndim == 1 and lead == value(node).dim() - 1 else None

    def _read(self, node: Node) -> tuple[int, np.ndarray]:
        """How many dimensions lead, and the sums of the others."""
        if node not in self._known:
            rule = _RULES.get(node.target) if node.op == "call_function" else None
            self._known[node] = rule(self, node) if rule else None
        return self._known[node] or self._whole(node)

    def _whole(self, node: Node) -> tuple[int, np.ndarray]:
        width = extents(node)[-1] if is_tensor(node) and value(node).dim() else ""
        if not isinstance(width, int):
            raise _UnknownError
        found = (value(node).dim() - 1, _array([Sum(((((node, i),), 1.0),)) for i in range(width)]))
        self._known[node] = found
        return found


Read = tuple[int, np.ndarray]


def _array(sums: list[Sum]) -> np.ndarray:
    made = np.empty(len(sums), dtype=object)
    made[:] = [_Held(s) for s in sums]
    return made


class _Held:
    """A sum in an array of numpy, which would look into a tuple."""

    __slots__ = ("sum",)

    def __init__(self, held: Sum) -> None:
        self.sum = held


_add = np.frompyfunc(lambda a, b: _Held(a.sum.plus(b.sum)), 2, 1)
_multiply = np.frompyfunc(lambda a, b: _Held(a.sum.product(b.sum)), 2, 1)
_scale = np.frompyfunc(lambda a, number: _Held(a.sum.times(number)), 2, 1)


def sums(entries: np.ndarray) -> list[Sum]:
    """The sums of an array [E]."""
    return [held.sum for held in entries]


def _spread(reader: Entries, node: Node) -> Read | None:
    """A table in the model's dtype: its entries, each once or twice."""
    table, form = args_of(node)[:2]
    lead, own = reader._read(table)
    if form == "halves":
        return lead, np.concatenate([own, own])
    return lead, np.repeat(own, 2) if form == "pairs" else own


def _cast(reader: Entries, node: Node) -> Read | None:
    x: Any = args_of(node)[0]
    rounds = value(node).dtype.itemsize < value(x).dtype.itemsize
    return None if rounds and x not in reader.turned else reader._read(x)


def _negative(reader: Entries, node: Node) -> Read | None:
    lead, own = reader._read(args_of(node)[0])
    return lead, _scale(own, -1.0)


def _two(combine: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Entries, Node], Read | None]:
    """Of two values with the same entries, or of a value and a number."""

    def rule(reader: Entries, node: Node) -> Read | None:
        if node.kwargs or len(args_of(node)) != 2 or not all(is_tensor(a) for a in args_of(node)):
            number = next((a for a in args_of(node) if isinstance(a, (int, float))), None)
            if node.target is not aten.mul.Tensor or number is None or len(args_of(node)) != 2:
                return None
            lead, own = reader._read(next(a for a in args_of(node) if is_tensor(a)))
            return lead, _scale(own, float(number))
        (a_lead, a), (b_lead, b) = (reader._read(v) for v in args_of(node))
        if a_lead != b_lead or a.shape != b.shape:
            return None
        return a_lead, combine(a, b)

    return rule


def _slice(reader: Entries, node: Node) -> Read | None:
    x, dim, start, stop, *step = args_of(node)
    lead, own = reader._read(x)
    at = dim - lead
    if at < 0:
        return None
    where: list[Any] = [slice(None)] * own.ndim
    where[at] = slice(start, stop, *step)
    return lead, own[tuple(where)]


def _select(reader: Entries, node: Node) -> Read | None:
    x, dim, index = args_of(node)
    lead, own = reader._read(x)
    at = dim - lead
    return (lead, np.take(own, index, axis=at)) if at >= 0 and own.ndim > 1 else None


def _joined(stacked: bool) -> Callable[[Entries, Node], Read | None]:
    def rule(reader: Entries, node: Node) -> Read | None:
        parts = [reader._read(p) for p in args_of(node)[0]]
        lead = parts[0][0]
        at = argument(node, 1, "dim", 0) % value(node).dim() - lead
        if at < 0 or any(p[0] != lead or p[1].ndim != parts[0][1].ndim for p in parts):
            return None
        arrays = [p[1] for p in parts]
        return lead, np.stack(arrays, at) if stacked else np.concatenate(arrays, at)

    return rule


def _view(reader: Entries, node: Node) -> Read | None:
    x: Any = args_of(node)[0]
    lead, own = reader._read(x)
    before, after = extents(x), extents(node)
    inner = [size for size in after[lead:] if isinstance(size, int)]
    if lead < 2 or before[:lead] != after[:lead] or len(inner) != len(after) - lead:
        return None
    return lead, own.reshape(inner)


def _unsqueezed(reader: Entries, node: Node) -> Read | None:
    x, dim = args_of(node)
    lead, own = reader._read(x)
    return (lead + 1, own) if dim <= lead else (lead, np.expand_dims(own, dim - lead))


def _repeated(reader: Entries, node: Node) -> Read | None:
    x, times = args_of(node)[:2]
    lead, own = reader._read(x)
    dim = argument(node, 2, "dim")
    at = None if dim is None else dim % value(node).dim() - lead
    return (lead, np.repeat(own, times, at)) if at is not None and at >= 0 else None


_RULES: dict[Any, Callable[[Entries, Node], Read | None]] = {
    leaf_ops.spread: _spread,
    aten.to.dtype: _cast,
    aten.neg.default: _negative,
    aten.mul.Tensor: _two(_multiply),
    aten.add.Tensor: _two(_add),
    aten.sub.Tensor: _two(lambda a, b: _add(a, _scale(b, -1.0))),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _joined(stacked=False),
    aten.stack.default: _joined(stacked=True),
    aten.reshape.default: _view,
    aten.unsqueeze.default: _unsqueezed,
    aten.repeat_interleave.self_int: _repeated,
}
