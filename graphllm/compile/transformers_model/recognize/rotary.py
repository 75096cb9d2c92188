"""Rotary: what turns the entries of heads by the angles of a table becomes `rope`, however it is written.

Known are rotations of the first 2F entries of heads [T, H, E], in halves or in pairs, in either direction. A rotation
of other entries is recognized on the part of the head that it turns, if that is a part of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.recognize.draft import Draft, aten, extents, is_tensor, value
from graphllm.compile.transformers_model.recognize.entries import Entries, Sum, sums
from graphllm.ops.attention.rope import rope

_LAST = (aten.cat.default, aten.add.Tensor, aten.to.dtype, aten.reshape.default, aten.sub.Tensor)


class _Turned(NamedTuple):
    """A rotation. rows: the value that is turned, from its entry ``first`` on. reverse: by the negative angles."""

    rows: Node
    first: int
    cos: Node
    sin: Node
    width: int  # angles, F
    interleaved: bool
    reverse: bool


def find_rotations(draft: Draft) -> None:
    """Put `rope` in the places of rotations, the largest ones first."""
    turned = _dependent(draft)
    entries = Entries(turned)
    for node in reversed(list(draft.graph.nodes)):
        if node not in turned or not node.users or node.target not in _LAST:
            continue
        if value(node).dim() != 3 or all(user in turned and user.target is aten.to.dtype for user in node.users):
            continue
        found = _rotation(entries, node)
        if found is not None:
            _write(draft, node, found)
    draft.drop_unread()
    for table in draft.calls(leaf_ops.spread):
        draft.note(table.name, "a rotation that rope does not have: it stays products, slices and sums")


def _dependent(draft: Draft) -> set[Node]:
    """The values of heads that depend on a table, up to what is more than a rotation."""
    found: set[Node] = set()
    for node in draft.graph.nodes:
        reads = node.target is leaf_ops.spread or any(n in found for n in node.all_input_nodes)
        if node.op == "call_function" and is_tensor(node) and reads:
            found.add(node)
    return found


def _rotation(entries: Entries, node: Node) -> _Turned | None:
    """The rotation that a value [T, H, E] is."""
    read = entries.of(node)
    if read is None:
        return None
    found = sums(read)
    E = len(found)
    first_pair = _pair(found[0])
    if first_pair is None:
        return None
    (rows, first), (cos, _), _, (sin, _), _ = first_pair
    width = next((i for i, s in enumerate(found) if len(s.terms) != 2), E) // 2
    if width == 0 or not all(_passes(s, (rows, first + i)) for i, s in enumerate(found[2 * width :], 2 * width)):
        return None
    for interleaved in (False, True):
        for reverse in (False, True):
            turned = _Turned(rows, first, cos, sin, width, interleaved, reverse)
            if all(s == _expected(turned, i) for i, s in enumerate(found[: 2 * width])):
                return turned if _fits(turned, E) else None
    return None


def _pair(entry: Sum) -> Any:
    """Of the first entry: its row and table, the other row and table, and the sign. The table of the first entry of the
    row is the cosine."""
    if len(entry.terms) != 2:
        return None
    read = []
    for product, coefficient in entry.terms:
        if len(product) != 2 or abs(coefficient) != 1:
            return None
        tables = [f for f in product if value(f[0]).dim() == 2]
        rows = [f for f in product if value(f[0]).dim() == 3]
        if len(tables) != 1 or len(rows) != 1:
            return None
        read.append((rows[0], tables[0], coefficient))
    read.sort(key=lambda t: t[0][1])
    (row, cos, plus), (other, sin, sign) = read
    return (row, cos, other, sin, sign) if plus == 1 and row[0] is other[0] and cos[0] is not sin[0] else None


def _expected(turned: _Turned, i: int) -> Sum:
    """What `rope` has in place i."""
    F, sign = turned.width, -1.0 if turned.reverse else 1.0
    f, second = (i // 2, i % 2) if turned.interleaved else (i % F, i // F)
    partner = i + (1 if turned.interleaved else F) * (-1 if second else 1)

    def product(entry: int, table: Node, coefficient: float) -> Sum:
        row, angle = Sum(((((turned.rows, turned.first + entry),), 1.0),)), Sum(((((table, f),), coefficient),))
        return row.product(angle)

    return product(i, turned.cos, 1.0).plus(product(partner, turned.sin, sign if second else -sign))


def _passes(entry: Sum, factor: tuple[Node, int]) -> bool:
    return entry.terms == (((factor,), 1.0),)


def _fits(turned: _Turned, E: int) -> bool:
    """Whether the rows are heads of the tokens that the tables are of."""
    tokens, *_, size = extents(turned.rows)
    if value(turned.rows).dim() != 3 or not isinstance(size, int) or turned.first + E > size:
        return False
    tables = (extents(turned.cos), extents(turned.sin))
    return all(tokens == T and isinstance(F, int) and turned.width <= F for T, F in tables)


def _write(draft: Draft, node: Node, turned: _Turned) -> None:
    rows, E = turned.rows, int(value(node).shape[-1])
    if (turned.first, E) != (0, value(rows).shape[-1]):
        rows = draft.insert(node, aten.slice.Tensor, rows, 2, turned.first, turned.first + E)
    tables = []
    for table in (turned.cos, turned.sin):
        if value(table).shape[1] != turned.width:
            table = draft.insert(node, aten.slice.Tensor, table, 1, 0, turned.width)
        tables.append(table)
    if turned.reverse:
        tables[1] = draft.insert(node, aten.neg.default, tables[1])
    flags = {"interleaved": True} if turned.interleaved else {}
    made = draft.insert(node, rope, x_THE=rows, cos_TF=tables[0], sin_TF=tables[1], **flags)
    if value(made).dtype != value(node).dtype:
        made = draft.insert(node, aten.to.dtype, made, value(node).dtype)
    draft.replace(node, made)
