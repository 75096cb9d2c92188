"""join_shared_expert: the expert that all tokens share becomes the last one of the others, chosen by every token."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import op_of
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.rewrite import PassReport, Unit, bound_once, register_pass
from graphllm.weights.plan.expr import Concat, Reshape
from graphllm.weights.plan.plan import WeightPlan

aten = torch.ops.aten


class _Found(NamedTuple):
    """A layer's experts and the shared one.

    experts: the call of `fused_moe`.
    stacks: its weights, gates and ups, and downs.
    matrices: the same of the shared one.
    share: the logits of how much it counts, [T, 1].
    """

    experts: Node
    stacks: tuple[Node, Node]
    matrices: tuple[Node, Node]
    share: Node


@register_pass(numerics="reorders")
def join_shared_expert(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn the sum of `fused_moe` and of a shared expert of the same width, times a sigmoid, into one `fused_moe`.

    It stays apart where ranks or engine cores divide experts, and where the experts' tokens are counted.
    """
    notes: list[str] = []
    apart = config.tensor_parallel_size > 1 or config.data_parallel_experts > 1 or config.counts_experts
    for add in () if apart else list(unit.graph.nodes):
        if (found := _match(add)) is None:
            continue
        joined = []
        for stack, matrix in zip(found.stacks, found.matrices, strict=True):
            plan, made = _joined(unit, plan, stack, matrix)
            joined.append(made)
        given = fused_moe.bind(found.experts.args, found.experts.kwargs)
        route = given["weights_TA"].args[0]
        arguments = {**moe_route.bind(route.args, route.kwargs), "share_T1": found.share}
        unit.replace((given["weights_TA"], given["experts_TA"]), moe_route, **arguments)
        given = fused_moe.bind(found.experts.args, found.experts.kwargs)
        call = unit.replace(add, fused_moe, **{**given, "gate_up_N2FD": joined[0], "down_NDF": joined[1]})
        notes.append(f"{call.name}: the shared expert is its last")
    return PassReport(len(notes), tuple(notes), plan if notes else None)


def _match(add: Node) -> _Found | None:
    """What the addition adds up, if it is experts and a shared one that can join them."""
    if add.target is not aten.add.Tensor or add.kwargs:
        return None
    for experts, product in (add.args, add.args[::-1]):
        given = bound_once(experts, fused_moe)
        if given is None or not isinstance(product, Node) or product.target is not aten.mul.Tensor:
            continue
        for gate, out in (product.args, product.args[::-1]):
            down = bound_once(out, linear)
            gated = bound_once(down["x_TI"], swiglu) if down else None
            up = bound_once(gated["gate_up_T2F"], linear) if gated else None
            if down is None or up is None or not isinstance(gate, Node) or gate.target is not aten.sigmoid.default:
                continue
            if up["x_TI"] is not given["x_TD"] or not all(map(_is_plain, (given, up, down))):
                continue
            stacks, matrices = (given["gate_up_N2FD"], given["down_NDF"]), (up["weight_OI"], down["weight_OI"])
            found = _Found(cast("Node", experts), stacks, matrices, cast("Node", gate.args[0]))
            return found if _fits(found, given) else None
    return None


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether the arguments of a product or of experts are numbers alone, and the activation that of `swiglu`."""
    extras = ("bias_O", "gate_up_bias_N2F", "down_bias_ND", "residual_TD", "adapter_ids_T")
    numbers = given["form"] == "" and all(given.get(name) is None for name in extras)
    return numbers and given.get("activation", "silu") == "silu"


def _fits(found: _Found, given: dict[str, Any]) -> bool:
    """Whether the shared expert is as wide as the others, all of them weights that one node reads, and whether its
    logits are there when the others are chosen."""
    weights = (*found.stacks, *found.matrices)
    widths = [s.meta["val"].shape[1:] == m.meta["val"].shape for s, m in zip(found.stacks, found.matrices, strict=True)]
    order = {node: i for i, node in enumerate(found.experts.graph.nodes)}
    routes = []
    for result in (given["weights_TA"], given["experts_TA"]):
        if result.target is not operator.getitem or len(result.users) != 1:
            return False
        routes.append(result.args[0])
    return (
        all(widths)
        and all(w.op == "placeholder" and w.meta["label"].startswith("w.") and len(w.users) == 1 for w in weights)
        and routes[0] is routes[1]
        and op_of(routes[0].target) is moe_route
        and order[found.share] < order[routes[0]]
    )


def _joined(unit: Unit, plan: WeightPlan, stack: Node, matrix: Node) -> tuple[WeightPlan, Node]:
    """The plan, and the input, in which a matrix stands after those of a stack."""
    name, last = (node.meta["label"].removeprefix("w.") for node in (stack, matrix))
    for entry, more in zip(unit.entries(name), unit.entries(last), strict=True):
        old = plan[entry]
        expr = Concat((plan.expr_of(entry), Reshape(plan.expr_of(more), (1, *old.shape[1:]))))
        shape = (old.shape[0] + 1, *old.shape[1:])
        plan = plan.replace(entry, replace(old, name=f"{entry}.joined", shape=shape, expr=expr)).replace(more)
    N, *sizes = stack.meta["val"].shape
    spec = TensorSpec.contiguous(str(stack.meta["val"].dtype).removeprefix("torch."), N + 1, *sizes)
    return plan, unit.input(f"w.{name}.joined", spec, before=stack)
