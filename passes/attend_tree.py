"""attend_tree: attention that looks at drafts along the branches of a tree."""

from __future__ import annotations

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import op_of
from graphllm.ops.attention.latent_attention import latent_attention
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.plan.plan import WeightPlan

_INPUT = "ancestors_T"
_OPS = (paged_attention, latent_attention)


@register_pass(numerics="changes")
def attend_tree(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Where steps verify a tree of drafts, give attention the ancestors of each row, an input of every graph with a
    cache. Rows of prompts have none and see what they saw."""
    found = [(node, op) for node in unit.graph.nodes if (op := op_of(node.target)) in _OPS]
    calls = {n: (op, given) for n, op in found if (given := op.bind(n.args, n.kwargs))[_INPUT] is None}
    if config.tree is None or not calls:
        return PassReport(0)
    ancestors = unit.input("step.ancestors", TensorSpec.contiguous("int64", "T"))
    for node, (op, given) in calls.items():
        unit.replace(node, op, **given | {_INPUT: ancestors})
    return PassReport(len(calls))
