"""scale_cache: attention divides keys and values by the checkpoint's scales as it rounds them to fp8."""

from __future__ import annotations

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import op_of
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.store_kv import store_kv
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.plan.cache_scales import NAME
from graphllm.weights.plan.plan import WeightPlan


@register_pass(numerics="changes")
def scale_cache(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Give `paged_attention`, and `store_kv`, the scales of their layer, where the plan has them."""
    calls = {node: op for node in unit.graph.nodes if (op := op_of(node.target)) in (paged_attention, store_kv)}
    if not calls or not {entry.name for entry in plan}.issuperset(unit.entries(NAME)):
        return PassReport(0)
    scales = unit.input(f"w.{NAME}", TensorSpec.contiguous("float32", 2))
    for node, op in calls.items():
        unit.replace(node, op, **op.bind(node.args, node.kwargs) | {NAME: scales})
    return PassReport(len(calls))
