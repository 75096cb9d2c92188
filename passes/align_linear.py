"""align_linear: products that are split end with columns of zeros where their rows would be no multiple of 16 bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ops.gemm.linear import linear
from graphllm.rewrite import PassReport, Unit, bound, fake_values, only_user, register_pass
from graphllm.weights.plan.expr import Pad
from graphllm.weights.plan.plan import WeightPlan

_SPLIT = torch.ops.aten.split_with_sizes.default
_COLUMNS = 8  # 16 bytes of 16-bit numbers


@register_pass(numerics="reorders")
def align_linear(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Pad the weight of a `linear` whose result is split, such as a router's with the gate of a shared expert.

    Libraries have slow kernels alone for rows that begin at any address. Who reads a part of a split takes rows of a
    wider tensor anyway. Weights that ranks divide, that are encoded, or that adapters change stay as they are.
    """
    notes: list[str] = []
    for node in list(unit.graph.nodes):
        given = bound(node, linear)
        if given is None or not (missing := -node.meta["val"].shape[1] % _COLUMNS):
            continue
        split, weight = only_user(node), given["weight_OI"]
        if split is None or not _is_split(split) or not _is_plain(unit, plan, given):
            continue
        name = weight.meta["label"].removeprefix("w.")
        for entry in unit.entries(name):
            old, expr = plan[entry], Pad(plan.expr_of(entry), 0, 0, missing)
            plan = plan.replace(entry, replace(old, name=f"{entry}.padded", shape=expr.shape, expr=expr, segments=()))
        dtype = str(weight.meta["val"].dtype).removeprefix("torch.")
        rows, inner = weight.meta["val"].shape
        padded = unit.input(f"w.{name}.padded", TensorSpec.contiguous(dtype, rows + missing, inner), before=weight)
        unit.replace(node, linear, **{**given, "weight_OI": padded})
        x, sizes, dim = cast(tuple[Node, list[int], int], split.args)
        split.args = (x, [*sizes, missing], dim)
        _widen(unit, split)
        notes.append(f"{name}: {missing} rows of zeros")
    return PassReport(len(notes), tuple(notes), plan if notes else None)


def _widen(unit: Unit, node: Node) -> None:
    """New values for a node, and for all that are views of it: their rows are as far apart as the wider tensor's."""
    old = node.meta["val"]
    with unit.shapes.mode, torch.no_grad():
        node.meta["val"] = made = node.target(*fake_values(node.args), **fake_values(node.kwargs))  # type: ignore[operator]
    if _specs(unit, made) != _specs(unit, old):
        for user in node.users:
            if user.op == "call_function":
                _widen(unit, user)


def _specs(unit: Unit, values: Any) -> list[TensorSpec]:
    return [unit.shapes.spec(value) for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _is_split(node: Node) -> bool:
    return node.target is _SPLIT and node.args[2:] == (1,)


def _is_plain(unit: Unit, plan: WeightPlan, given: dict[str, Any]) -> bool:
    """Whether a product is of a weight in plain numbers alone, the same on every rank, that nothing else reads."""
    weight = given["weight_OI"]
    if given["form"] or given["bias_O"] is not None or not weight.meta.get("label", "").startswith("w."):
        return False
    entries = [plan[e] for e in unit.entries(weight.meta["label"].removeprefix("w."))]
    return only_user(weight) is not None and all(e.division is None and e.tie is None for e in entries)
