"""widen_linear: products of rows that were cast to float32, such as a router's, keep factors of their own dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ops.gemm.linear import linear
from graphllm.ops.gemm.wide_linear import wide_linear
from graphllm.rewrite import PassReport, Unit, bound, is_implemented, only_user, register_pass
from graphllm.weights.plan.plan import WeightPlan

_CAST = torch.ops.aten._to_copy.default


@register_pass(numerics="reorders")
def widen_linear(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Make `wide_linear` of a `linear` in float32 whose rows were cast, where an implementation takes it.

    The weight is then stored in the rows' dtype, as checkpoints have it, which is exact for a router of such a
    checkpoint. Products by tensor cores with float32 sums take a tenth of the time of those of float32 numbers.
    """
    notes: list[str] = []
    for node in list(unit.graph.nodes):
        given = bound(node, linear)
        if given is None or given["form"] or given["bias_O"] is not None:
            continue
        cast, weight = given["x_TI"], given["weight_OI"]
        label = weight.meta.get("label", "")
        if cast.target is not _CAST or weight.meta["val"].dtype != torch.float32 or not label.startswith("w."):
            continue
        (rows,), name = cast.all_input_nodes, label.removeprefix("w.")
        entries = [(e, plan[e]) for e in unit.entries(name)]
        if only_user(weight) is None or any(e.tie is not None for _, e in entries):
            continue
        dtype = str(rows.meta["val"].dtype).removeprefix("torch.")
        spec = TensorSpec.contiguous(dtype, *weight.meta["val"].shape)
        if not is_implemented(unit, config, wide_linear, x_TI=rows, weight_OI=unit.shapes.tensor(spec)):
            continue
        for entry, old in entries:
            plan = plan.replace(entry, replace(old, name=f"{entry}.narrow", dtype=dtype))
        narrow = unit.input(f"w.{name}.narrow", spec, before=weight)
        unit.replace(node, wide_linear, x_TI=rows, weight_OI=narrow)
        notes.append(f"{name}: {dtype}")
    return PassReport(len(notes), tuple(notes), plan if notes else None)
