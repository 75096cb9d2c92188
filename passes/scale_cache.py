"""scale_cache: attention divides keys and values by the checkpoint's scales as it rounds them to fp8."""

from __future__ import annotations

import torch

from graphllm.config import CompileConfig
from graphllm.ir.op import op_of
from graphllm.ops.paged_attention import paged_attention
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.cache_scales import NAME
from graphllm.weights.plan import WeightPlan


@register_pass(numerics="changes")
def scale_cache(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Give `paged_attention` the scales of its layer, where the plan has them."""
    calls = [node for node in unit.graph.nodes if op_of(node.target) is paged_attention]
    if not calls or not {entry.name for entry in plan}.issuperset(unit.entries(NAME)):
        return PassReport(0)
    with unit.graph.inserting_before(next(iter(unit.graph.nodes))):
        scales = unit.graph.placeholder(NAME)
    with unit.shapes.mode:
        fake = torch.empty(2, dtype=torch.float32, device=unit.shapes.device)
    scales.meta.update(val=fake, label=f"w.{NAME}")
    for node in calls:
        unit.replace(node, paged_attention, **paged_attention.bind(node.args, node.kwargs) | {NAME: scales})
    return PassReport(len(calls))
