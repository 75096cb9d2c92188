"""canonicalize: give equal computations equal text, so that pieces deduplicate and nothing depends on traced sizes."""

from __future__ import annotations

import torch

from graphllm.config import CompileConfig
from graphllm.ir.graph import target_name
from graphllm.ir.op import op_of
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.plan.plan import WeightPlan

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


@register_pass(numerics="bitwise")
def canonicalize(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Write the token dimension of views as -1, drop views and copies that change nothing, merge equal pure calls."""
    graph, notes = unit.graph, []
    for node in list(graph.nodes):
        if node.target in _VIEWS:
            sizes = node.args[1]
            if sum(isinstance(s, torch.fx.Node) for s in sizes) == 1:
                node.args = (node.args[0], [-1 if isinstance(s, torch.fx.Node) else s for s in sizes])
                notes.append(f"{node.name}: size as -1")
            if node.args[0].meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(node.args[0])
                notes.append(f"{node.name}: dropped identity view")
    seen: dict[tuple[str, str], torch.fx.Node] = {}
    written = {op.bind(n.args, n.kwargs)[w] for n in graph.nodes if (op := op_of(n.target)) for w in op.mutates}
    for node in list(graph.nodes):
        op = op_of(node.target)
        if node.op != "call_function" or (op is not None and (op.mutates or op.collective)):
            continue
        if written.intersection(node.all_input_nodes):  # reads before and after the write differ
            continue
        key = (target_name(node.target), repr((node.args, node.kwargs)))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            notes.append(f"{node.name}: same as {seen[key].name}")
        else:
            seen[key] = node
    return PassReport(len(notes), tuple(notes))
