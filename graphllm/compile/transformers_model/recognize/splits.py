"""Splits: parts that make up a projection's result are taken by one split, of heads where all of them are heads.

As in the hand-written families: view [T, H + 2K, E], then a split into H, K and K.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from graphllm.compile.transformers_model.recognize.draft import Draft, args_of, aten, own_op, value
from graphllm.ops.gemm.linear import linear
from graphllm.rewrite import only_user


def join_parts(draft: Draft) -> None:
    """Put a split in the places of slices that cover the results of a `linear`."""
    for call in draft.calls(linear):
        parts = sorted((u for u in call.users if _is_part(u)), key=lambda u: args_of(u)[2])
        if len(parts) < 2 or len(parts) != len(call.users) or not _covers(call, parts):
            continue
        heads = _heads(parts)
        before = min(parts, key=list(draft.graph.nodes).index)
        if heads:
            whole = draft.insert(before, aten.reshape.default, call, [-1, sum(heads[1]), heads[0]])
            _split(draft, before, whole, heads[1], [next(iter(p.users)) for p in parts])
        else:
            _split(draft, before, call, [int(value(p).shape[1]) for p in parts], parts)
    draft.drop_unread()


def _is_part(node: Node) -> bool:
    return node.target is aten.slice.Tensor and len(args_of(node)) == 4 and args_of(node)[1] == 1


def _covers(call: Node, parts: list[Node]) -> bool:
    """Whether slices follow each other from the first to the last entry."""
    at: Any = 0
    for part in parts:
        if args_of(part)[2] != at:
            return False
        at = args_of(part)[3]
    return bool(at == value(call).shape[1]) and own_op(call) is linear


def _heads(parts: list[Node]) -> tuple[int, list[int]] | None:
    """The size of a head, and how many heads each part has, where nothing else reads the parts."""
    sizes, counts = set(), []
    for part in parts:
        view = only_user(part)
        if view is None or view.target is not aten.reshape.default or value(view).dim() != 3:
            return None
        _, count, size = value(view).shape
        if not isinstance(count, int) or count * size != value(part).shape[1]:
            return None
        sizes.add(size)
        counts.append(count)
    return (int(sizes.pop()), counts) if len(sizes) == 1 else None


def _split(draft: Draft, before: Node, whole: Node, sizes: list[int], parts: list[Node]) -> None:
    split = draft.insert(before, aten.split_with_sizes.default, whole, sizes, 1)
    for i, part in enumerate(parts):
        draft.replace(part, draft.insert(before, operator.getitem, split, i))
