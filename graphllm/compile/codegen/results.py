"""What an implementation returns, held against what its op's body does."""

from __future__ import annotations

from typing import Any

import torch

from graphllm.ir.graph import GraphError, Shapes


def as_the_body(made: Any, body: Any, shapes: Shapes, who: str) -> Any:
    """What an implementation returned, in the strides of the body's result, for which the next piece is compiled.

    body: the fake result of the op.
    who: for messages.

    Raises GraphError for results of other types and shapes.
    """
    if isinstance(body, (tuple, list)):
        many = made if isinstance(made, (tuple, list)) else [made]
        if len(many) != len(body):
            raise GraphError(f"{who} returns {len(many)} tensors, the body {len(body)}")
        return tuple(as_the_body(m, b, shapes, who) for m, b in zip(many, body, strict=True))
    if not isinstance(body, torch.Tensor):
        return made
    if not isinstance(made, torch.Tensor):
        raise GraphError(f"{who} returns {made!r}, the body {shapes.spec(body)}")
    own, wanted = shapes.spec(made), shapes.spec(body)
    if (own.dtype, own.shape) != (wanted.dtype, wanted.shape):
        raise GraphError(f"{who} returns {own}, the body {wanted}")
    if all(size == 1 or a == b for size, a, b in zip(own.shape, own.stride, wanted.stride, strict=True)):
        return made
    order = sorted(range(body.dim()), key=lambda i: (-_usual(body.stride()[i]), i))
    dense = made.permute(order).clone(memory_format=torch.contiguous_format)
    inverse = [order.index(i) for i in range(body.dim())]
    copied = dense.permute(inverse)
    if shapes.spec(copied).stride != wanted.stride:
        raise GraphError(f"{who}: the body's result has gaps between its numbers, {wanted}; return it contiguous")
    return copied


def _usual(size: int | torch.SymInt) -> int:
    """A size without asking for it, which would fix it."""
    return size if isinstance(size, int) else int(size.node.hint)
