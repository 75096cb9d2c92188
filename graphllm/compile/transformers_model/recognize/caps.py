"""Caps: cap * tanh(x / cap) becomes `soft_cap`."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphllm.compile.transformers_model.recognize.draft import Draft, args_of, aten, value
from graphllm.ops.activations.soft_cap import soft_cap
from graphllm.rewrite import only_user


def find_caps(draft: Draft) -> None:
    """Put `soft_cap` in the places of cap * tanh(x / cap)."""
    for node in draft.calls(aten.tanh.default):
        x, cap = _number(args_of(node)[0], aten.div.Tensor)
        if cap is None:
            x, inverse = _number(args_of(node)[0], aten.mul.Tensor)
            cap = None if not inverse else 1 / inverse
        user = only_user(node)
        if x is None or cap is None or user is None:
            continue
        _, factor = _number(user, aten.mul.Tensor)
        if factor is not None and factor == cap > 0 and value(user).dtype == value(x).dtype:
            draft.replace(user, draft.insert(user, soft_cap, x=x, cap=float(cap)))
    draft.drop_unread()


def _number(node: Any, target: torch._ops.OpOverload) -> tuple[Node | None, float | None]:
    """A value and the number that it is multiplied with or divided by."""
    if not isinstance(node, Node) or node.op != "call_function" or node.target is not target:
        return None, None
    pairs = (args_of(node)[:2], args_of(node)[1::-1]) if target is aten.mul.Tensor else (args_of(node)[:2],)
    for x, number in pairs:
        if isinstance(x, Node) and isinstance(number, (int, float)):
            return x, float(number)
    return None, None
