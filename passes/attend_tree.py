"""attend_tree: attention that looks at drafts along the branches of a tree."""

from __future__ import annotations

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.rewrite import PassReport, Unit, bound, register_pass
from graphllm.weights.plan.plan import WeightPlan

_INPUT = "ancestors_T"


@register_pass(numerics="changes")
def attend_tree(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Where steps verify a tree of drafts, give `paged_attention` the ancestors of each row, an input of every graph
    with a cache. Rows of prompts have none and see what they saw."""
    calls = {n: given for n in unit.graph.nodes if (given := bound(n, paged_attention)) and given[_INPUT] is None}
    if config.tree is None or not calls:
        return PassReport(0)
    ancestors = unit.input("step.ancestors", TensorSpec.contiguous("int64", "T"))
    for node, given in calls.items():
        unit.replace(node, paged_attention, **given | {_INPUT: ancestors})
    return PassReport(len(calls))
