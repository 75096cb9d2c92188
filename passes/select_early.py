"""select_early: what follows the last attention is computed for the rows that are sampled from, not for a whole prompt.

The head takes some rows of the last layer's result. All that is computed row by row on the way there, which is the
last layer's projection and feed-forward part, may as well begin with those rows: 4 % of the work of a long prompt in a
model of 24 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.op import op_of
from graphllm.rewrite import PassReport, Unit, fake_values, register_pass
from graphllm.weights.plan.plan import WeightPlan

_SELECT = torch.ops.aten.index_select.default
_ELEMENTWISE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


@register_pass(numerics="reorders")
def select_early(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Move an `index_select` of rows to before the row-wise nodes that make what it selects from, in steps with a
    dynamic number of tokens, which may exceed the number of sampled rows."""
    notes: list[str] = []
    if unit.bucket is None:
        return PassReport(0)
    for node in unit.graph.find_nodes(op="call_function", target=_SELECT):
        x, dim, rows = cast(tuple[Node, int, Node], node.args)
        fewer = not _has_tokens(unit, rows)  # in a decode step every token is sampled from
        if dim == 0 and rows.op == "placeholder" and _has_tokens(unit, x) and fewer:
            notes += _hoist(unit, node, x, rows)
    return PassReport(len(notes), tuple(notes))


def _hoist(unit: Unit, select: Node, x: Node, rows: Node) -> list[str]:
    early: dict[Node, None] = {}
    for node in reversed(list(unit.graph.nodes)):
        read_here = all(u is select or u in early for u in node.users) and len(node.users) > 0
        if read_here and _has_tokens(unit, node) and _is_rowwise(unit, node):
            early[node] = None
    if x not in early:
        return []
    selected: dict[Node, Node] = {}
    with unit.shapes.mode:
        for node in reversed(early):
            for value in node.all_input_nodes:
                if value not in early and value not in selected and _has_tokens(unit, value):
                    with unit.graph.inserting_before(node):
                        taken = unit.graph.call_function(_SELECT, (value, 0, rows))
                    taken.meta["val"] = _SELECT(value.meta["val"], 0, rows.meta["val"])
                    selected[value] = taken
            node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: selected.get(n, n))
            args, kwargs = fake_values((node.args, node.kwargs))
            node.meta["val"] = cast(Callable[..., Any], node.target)(*args, **kwargs)
    select.replace_all_uses_with(x)
    return [f"{select.name}: before {', '.join(n.name for n in reversed(early))}"]


def _has_tokens(unit: Unit, node: Node) -> bool:
    """Whether a value's first dimension, and no other, is the tokens of the step."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    first, *others = map(unit.shapes.dim, value.shape)
    return first == "T" and all(isinstance(d, int) for d in others)


def _is_rowwise(unit: Unit, node: Node) -> bool:
    op = op_of(node.target)
    if op is not None:
        return op.rowwise
    if node.target in _VIEWS:
        x, sizes = cast(tuple[Node, list[Any]], node.args)
        return sizes[0] == -1 and all(isinstance(s, int) for s in sizes) and _has_tokens(unit, x)
    if node.target in _ELEMENTWISE:
        rank = node.meta["val"].dim()
        others = [a for a in node.all_input_nodes if not _has_tokens(unit, a)]
        same = all(a.meta["val"].dim() == rank for a in node.all_input_nodes if a not in others)
        return same and all(a.meta["val"].dim() < rank for a in others)
    return False
