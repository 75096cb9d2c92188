"""Scores: numbers that queries or keys are multiplied with become part of attention's scale."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.recognize.draft import Draft, args_of, aten, is_tensor, value
from graphllm.rewrite import only_user

_THROUGH = (aten.reshape.default, aten.transpose.int)


def find_scales(draft: Draft) -> None:
    """Move factors of the queries and keys of each attention into its scale."""
    for attention in draft.calls(leaf_ops.attention):
        for rows in args_of(attention)[:2]:
            found = _factor(rows)
            if found is None:
                continue
            product, x, factor = found
            product.replace_all_uses_with(x)
            args = list(args_of(attention))
            args[3] = float(args[3]) * factor
            attention.args = tuple(args)
    draft.drop_unread()


def _factor(node: Any) -> tuple[Node, Node, float] | None:
    """The product that makes rows, what it is of, and the number, where only attention reads the rows."""
    while isinstance(node, Node) and node.op == "call_function" and only_user(node) is not None:
        if node.target in _THROUGH:
            node = args_of(node)[0]
            continue
        if node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            return None
        pairs = [args_of(node)[:2]] + ([args_of(node)[1::-1]] if node.target is aten.mul.Tensor else [])
        for x, number in pairs:
            same = is_tensor(x) and isinstance(number, (int, float)) and value(x).dtype == value(node).dtype
            if same:
                factor = float(number) if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / float(number)
                return node, x, factor
        return None
    return None
