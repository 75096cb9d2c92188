"""attend_tree: attention that looks at drafts along the branches of a tree."""

from __future__ import annotations

import torch

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import op_of
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.plan.plan import WeightPlan

_INPUT = "ancestors_T"


@register_pass(numerics="changes")
def attend_tree(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Where steps verify a tree of drafts, give `paged_attention` the ancestors of each row, an input of every graph
    with a cache. Rows of prompts have none and see what they saw."""
    calls = [
        node
        for node in unit.graph.nodes
        if op_of(node.target) is paged_attention and paged_attention.bind(node.args, node.kwargs)[_INPUT] is None
    ]
    if config.tree is None or not calls:
        return PassReport(0)
    with unit.graph.inserting_before(next(iter(unit.graph.nodes))):
        ancestors = unit.graph.placeholder(_INPUT)
    with unit.shapes.mode, torch.no_grad():
        fake = unit.shapes.tensor(TensorSpec.contiguous("int64", "T"))
    ancestors.meta.update(val=fake, label="step.ancestors")
    for node in calls:
        unit.replace(node, paged_attention, **paged_attention.bind(node.args, node.kwargs) | {_INPUT: ancestors})
    return PassReport(len(calls))
