"""Layouts: heads stay behind the tokens. A transpose of [T, H, E] moves on through what works on the last dimension
until another one undoes it."""

from __future__ import annotations

from typing import Any

from torch.fx import Node, map_arg

from graphllm.compile.transformers_model.recognize.draft import (
    Draft,
    args_of,
    argument,
    aten,
    extents,
    is_pointwise,
    is_tensor,
    value,
)  # fmt: skip

# Calls along one dimension, which is the argument in this place.
_ALONG_LAST = {aten.slice.Tensor: 1, aten.cat.default: 1, aten.repeat_interleave.self_int: 2}
_OVER_LAST = frozenset((aten.layer_norm.default, aten.rms_norm.default))
_REDUCED = frozenset((aten.mean.dim, aten.sum.dim_IntList, aten.amax.default))
_MOVED = 3  # dimensions of values that are turned: heads, tokens, entries; more of them follow the entries


def put_tokens_first(draft: Draft) -> None:
    """Replace each transpose of the first two dimensions by a value that has been computed in the other order."""
    turned: dict[Node, Node | None] = {}
    for node in draft.calls(aten.transpose.int):
        if _is_turn(node) and node.users and (other := _turned(draft, args_of(node)[0], turned)) is not None:
            draft.replace(node, other)
    draft.drop_unread()


def _is_turn(node: Node) -> bool:
    return node.target is aten.transpose.int and args_of(node)[1:] == (0, 1) and value(node).dim() >= _MOVED


def _turned(draft: Draft, node: Any, known: dict[Node, Node | None]) -> Node | None:
    """The value with its first two dimensions exchanged, computed so from the start; None where that is not known."""
    if node not in known:
        known[node] = _compute(draft, node, known)
    return known[node]


def _compute(draft: Draft, node: Node, known: dict[Node, Node | None]) -> Node | None:
    if node.op != "call_function" or not is_tensor(node):
        return None
    rank, target = value(node).dim(), node.target
    if _is_turn(node):
        return args_of(node)[0]
    if target is aten.unsqueeze.default and args_of(node)[1] in (0, 1):
        return draft.insert(node, target, args_of(node)[0], 1 - args_of(node)[1])
    if target in (aten.stack.default, aten.reshape.default):
        return _in_pairs(draft, node, known)
    if target in _ALONG_LAST:
        place = _ALONG_LAST[target]
        dim = argument(node, place, "dim", 0 if target is not aten.repeat_interleave.self_int else -1)
        if dim % rank < 2:
            return None
    elif target in _REDUCED:
        dims = argument(node, 1, "dim")
        if not argument(node, 2, "keepdim", False) or any(d % rank < 2 for d in dims):
            return None
    elif target in _OVER_LAST:
        if len(args_of(node)[1]) != rank - 2:
            return None
        return _with_first(draft, node, known)
    elif not is_pointwise(node):
        return None
    made: dict[Node, Node] = {}
    for operand in node.all_input_nodes:
        own = value(operand).dim()
        if own < rank - 1 and is_pointwise(node):
            made[operand] = operand  # a parameter of the last dimensions
            continue
        other = _turned(draft, operand, known) if own == rank else None
        if other is None:
            return None
        made[operand] = other
    args, kwargs = _with(node, made)
    return draft.insert(node, target, *args, **kwargs)


def _with_first(draft: Draft, node: Node, known: dict[Node, Node | None]) -> Node | None:
    """Of a norm: only its rows are turned."""
    rows: Any = args_of(node)[0]
    other = _turned(draft, rows, known)
    if other is None:
        return None
    args, kwargs = _with(node, {rows: other})
    return draft.insert(node, node.target, *args, **kwargs)


def _in_pairs(draft: Draft, node: Node, known: dict[Node, Node | None]) -> Node | None:
    """What stacks values in a new last dimension, or splits or joins dimensions after the second."""
    parts: Any = args_of(node)[0] if node.target is aten.stack.default else [args_of(node)[0]]
    others = [_turned(draft, part, known) for part in parts]
    if any(other is None for other in others):
        return None
    if node.target is aten.stack.default:
        dim = argument(node, 1, "dim", 0) % value(node).dim()
        return draft.insert(node, node.target, others, dim) if dim >= 2 else None
    sizes, before = extents(node), extents(parts[0])
    if sizes[:2] != before[:2] or not all(isinstance(s, int) for s in sizes[2:]):
        return None
    lead = [s if isinstance(s, int) else -1 for s in (sizes[1], sizes[0])]
    return draft.insert(node, node.target, others[0], [*lead, *sizes[2:]]) if lead.count(-1) <= 1 else None


def _with(node: Node, made: dict[Node, Node]) -> tuple[Any, Any]:
    return map_arg((node.args, node.kwargs), lambda n: made.get(n, n))
