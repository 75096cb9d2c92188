"""What a pass asks of nodes: the arguments of a call, the only reader of a value, and the sum that it is part of."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphllm.ir.op import Op, op_of


def bound(value: Any, op: Op) -> dict[str, Any] | None:
    """The arguments by name of the call that makes a value; None if that is not a call of the op."""
    if not isinstance(value, Node) or op_of(value.target) is not op:
        return None
    return op.bind(value.args, value.kwargs)


def only_user(node: Node) -> Node | None:
    """The node that reads a value, if it is one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def bound_once(value: Any, op: Op) -> dict[str, Any] | None:
    """As `bound`, of a value that one node reads."""
    return bound(value, op) if isinstance(value, Node) and only_user(value) else None


def sum_with(term: Node) -> tuple[Node | None, Node | None]:
    """The only reader of a value if it is a plain addition, and what it adds, of the same shape and dtype."""
    add = only_user(term)
    if add is None or add.target is not torch.ops.aten.add.Tensor or add.kwargs:
        return None, None
    others = [a for a in add.args if a is not term]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None, None
    value, own = others[0].meta["val"], term.meta["val"]
    return (add, others[0]) if value.shape == own.shape and value.dtype == own.dtype else (None, None)
