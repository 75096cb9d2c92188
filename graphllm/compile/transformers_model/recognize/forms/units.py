"""Units: dimensions of size one that surround work on entries go, and with them the reshapes around it."""

from __future__ import annotations

from torch.fx import Node, map_arg

from graphllm.compile.transformers_model.recognize.draft import (
    Draft,
    args_of,
    aten,
    extents,
    is_pointwise,
    is_tensor,
    value,
)  # fmt: skip


def drop_units(draft: Draft) -> None:
    """Compute values without dimensions of size one where a reshape takes these away in the end."""
    for node in draft.calls(aten.reshape.default):
        known: dict[Node, Node | None] = {}
        wanted = extents(node)
        if node.users and len(wanted) < value(args_of(node)[0]).dim() and 1 not in wanted:
            made = _without(draft, args_of(node)[0], wanted, known)
            if made is not None:
                draft.replace(node, made)
    draft.drop_unread()


def _without(draft: Draft, node: Node, wanted: tuple[int | str, ...], known: dict[Node, Node | None]) -> Node | None:
    """The value in the wanted shape, which has no dimensions of size one."""
    if node not in known:
        known[node] = _compute(draft, node, wanted, known)
    return known[node]


def _compute(draft: Draft, node: Node, wanted: tuple[int | str, ...], known: dict[Node, Node | None]) -> Node | None:
    if not is_tensor(node) or tuple(e for e in extents(node) if e != 1) != wanted or node.op != "call_function":
        return None
    if node.target is aten.reshape.default:
        under = args_of(node)[0]
        if extents(under) == wanted:
            return under
        sizes = [e if isinstance(e, int) else -1 for e in wanted]
        return draft.insert(node, aten.reshape.default, under, sizes) if sizes.count(-1) <= 1 else None
    if node.target is aten.unsqueeze.default:
        (under, _) = args_of(node)
        return under if extents(under) == wanted else _without(draft, under, wanted, known)
    if not is_pointwise(node):
        return None
    made: dict[Node, Node] = {}
    for operand in node.all_input_nodes:
        if value(operand).dim() <= 1 and extents(operand) in ((), wanted[-1:]):
            made[operand] = operand
            continue
        other = _without(draft, operand, wanted, known)
        if other is None:
            return None
        made[operand] = other
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: made[n])
    return draft.insert(node, node.target, *args, **kwargs)
