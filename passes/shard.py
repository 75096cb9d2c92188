"""shard: partial sums of row-parallel layers are added up over the ranks. The weights were divided with the plan."""

from __future__ import annotations

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.groups import TENSOR
from graphllm.ir.op import op_of
from graphllm.ops.all_reduce import all_reduce
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.plan import WeightPlan


@register_pass(numerics="reorders")
def shard(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Put `all_reduce` behind every op that multiplies with a weight whose inputs are divided (shard="input"). Its bias
    is added once, to the sum."""
    ranks = config.tensor_parallel_size
    if ranks == 1:
        return PassReport(0)
    changed: dict[Node, str] = {}
    for weight in unit.graph.find_nodes(op="placeholder"):
        label = weight.meta["label"]
        if label.startswith("w.") and plan[unit.entries(label[2:])[0]].shard == "input":
            changed |= {user: label[2:] for user in weight.users if op_of(user.target) is not None}
    for node in changed:
        _reduce(unit, node, ranks)
    return PassReport(len(changed), tuple(f"{name}: all_reduce" for name in changed.values()))


def _reduce(unit: Unit, node: Node, ranks: int) -> None:
    """The sum of what the node gives on all ranks, in its place."""
    op, graph = op_of(node.target), unit.graph
    assert op is not None
    arguments = op.bind(node.args, node.kwargs)
    bias = arguments.pop("bias_O", None)
    with graph.inserting_after(node):
        total = graph.call_function(all_reduce.overload, (node, TENSOR, ranks))
    total.meta["val"] = node.meta["val"]
    last = total
    if bias is not None:
        if arguments.get("softcap"):
            raise ValueError(f"{node.name}: a layer with divided inputs cannot have a bias and a soft cap")
        node.args, node.kwargs = (), {**arguments, "bias_O": None}
        with graph.inserting_after(total):
            last = graph.call_function(torch.ops.aten.add.Tensor, (total, bias))
        last.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(last, delete_user_cb=lambda user: user is not total)
