"""join_shared_expert: experts that all tokens share become the last of the others, chosen by every token."""

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
from graphllm.weights.plan.expr import Concat, Expr, Permute, Reshape
from graphllm.weights.plan.plan import WeightPlan

aten = torch.ops.aten


class _Found(NamedTuple):
    """A layer's experts and the shared ones.

    experts: the call of `fused_moe`.
    stacks: its weights, gates and ups, and downs.
    matrices: the same of the shared ones, side by side.
    number: how many these are.
    share: the logits of how much the shared one counts, [T, 1]; None where they count as they are.
    """

    experts: Node
    stacks: tuple[Node, Node]
    matrices: tuple[Node, Node]
    number: int
    share: Node | None


@register_pass(numerics="reorders")
def join_shared_expert(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn the sum of `fused_moe` and of a dense part that is as wide as one or several experts into one `fused_moe`.
    One of an expert's width may have a factor, a sigmoid.

    It stays apart where ranks or engine cores divide experts, and where the experts' tokens are counted.
    """
    notes: list[str] = []
    apart = config.tensor_parallel_size > 1 or config.data_parallel_experts > 1 or config.counts_experts
    for add in () if apart else list(unit.graph.nodes):
        if (found := _match(add)) is None:
            continue
        joined = []
        for stack, matrix in zip(found.stacks, found.matrices, strict=True):
            plan, made = _joined(unit, plan, stack, matrix, found.number)
            joined.append(made)
        given = fused_moe.bind(found.experts.args, found.experts.kwargs)
        route = given["weights_TA"].args[0]
        more = {"shared": found.number} if found.share is None else {"share_T1": found.share}
        arguments = {**moe_route.bind(route.args, route.kwargs), **more}
        unit.replace((given["weights_TA"], given["experts_TA"]), moe_route, **arguments)
        given = fused_moe.bind(found.experts.args, found.experts.kwargs)
        call = unit.replace(add, fused_moe, **{**given, "gate_up_N2FD": joined[0], "down_NDF": joined[1]})
        notes.append(f"{call.name}: what all tokens share is its last {found.number}")
    return PassReport(len(notes), tuple(notes), plan if notes else None)


def _match(add: Node) -> _Found | None:
    """What the addition adds up, if it is experts and shared ones that can join them."""
    if add.target is not aten.add.Tensor or add.kwargs:
        return None
    for experts, shared in (add.args, add.args[::-1]):
        given = bound_once(experts, fused_moe)
        if given is None:
            continue
        for out, share in _factors(shared):
            down = bound_once(out, linear)
            gated = bound_once(down["x_TI"], swiglu) if down else None
            up = bound_once(gated["gate_up_T2F"], linear) if gated else None
            if down is None or up is None or up["x_TI"] is not given["x_TD"]:
                continue
            if not all(map(_is_plain, (given, up, down))):
                continue
            stacks, matrices = (given["gate_up_N2FD"], given["down_NDF"]), (up["weight_OI"], down["weight_OI"])
            count = matrices[1].meta["val"].shape[1] // stacks[1].meta["val"].shape[2]
            found = _Found(cast("Node", experts), stacks, matrices, count, share)
            return found if _fits(found, given) else None
    return None


def _factors(shared: Any) -> list[tuple[Any, Node | None]]:
    """What a dense part gives, with the logits of its factor, if it is a product with a sigmoid, or None."""
    if not isinstance(shared, Node) or shared.target is not aten.mul.Tensor:
        return [(shared, None)]
    pairs = (shared.args, shared.args[::-1])
    gated = [(x, f.args[0]) for f, x in pairs if isinstance(f, Node) and f.target is aten.sigmoid.default]
    return [(x, cast("Node", logits)) for x, logits in gated]


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether the arguments of a product or of experts are numbers alone, and the activation that of `swiglu`."""
    extras = ("bias_O", "gate_up_bias_N2F", "down_bias_ND", "residual_TD", "adapter_ids_T")
    numbers = given["form"] == "" and all(given.get(name) is None for name in extras)
    return numbers and given.get("activation", "silu") == "silu"


def _fits(found: _Found, given: dict[str, Any]) -> bool:
    """Whether the shared ones are as wide as the others, all of them weights that one node reads, and whether their
    logits are there when the others are chosen."""
    weights = (*found.stacks, *found.matrices)
    (_, rows, D), (_, _, F) = (stack.meta["val"].shape for stack in found.stacks)
    shapes = [(found.number * rows, D), (D, found.number * F)]
    widths = [m.meta["val"].shape == shape for m, shape in zip(found.matrices, shapes, strict=True)]
    order = {node: i for i, node in enumerate(found.experts.graph.nodes)}
    routes = []
    for result in (given["weights_TA"], given["experts_TA"]):
        if result.target is not operator.getitem or len(result.users) != 1:
            return False
        routes.append(result.args[0])
    return (
        all(widths)
        and found.number > 0
        and (found.share is None or found.number == 1)
        and all(w.op == "placeholder" and w.meta["label"].startswith("w.") and len(w.users) == 1 for w in weights)
        and routes[0] is routes[1]
        and op_of(routes[0].target) is moe_route
        and (found.share is None or order[found.share] < order[routes[0]])
    )


def _joined(unit: Unit, plan: WeightPlan, stack: Node, matrix: Node, count: int) -> tuple[WeightPlan, Node]:
    """The plan, and the input, in which ``count`` experts, side by side in a matrix, stand after those of a stack."""
    name, last = (node.meta["label"].removeprefix("w.") for node in (stack, matrix))
    N, *sizes = stack.meta["val"].shape
    for entry, more in zip(unit.entries(name), unit.entries(last), strict=True):
        expr = Concat((plan.expr_of(entry), _stacked(plan.expr_of(more), plan[more].shape, count, sizes)))
        joined = replace(plan[entry], name=f"{entry}.joined", shape=(N + count, *sizes), expr=expr)
        plan = plan.replace(entry, joined).replace(more)
    spec = TensorSpec.contiguous(str(stack.meta["val"].dtype).removeprefix("torch."), N + count, *sizes)
    return plan, unit.input(f"w.{name}.joined", spec, before=stack)


def _stacked(matrix: Expr, shape: tuple[int, ...], count: int, sizes: list[int]) -> Expr:
    """Experts [count, *sizes] of their matrix: gates of all, then ups, are its rows; or its columns are their downs."""
    if count == 1:
        return Reshape(matrix, (1, *sizes))
    if shape[1] == sizes[1]:
        parts: Expr = Permute(Reshape(matrix, (2, count, sizes[0] // 2, sizes[1])), (1, 0, 2, 3))
    else:
        parts = Permute(Reshape(matrix, (sizes[0], count, sizes[1])), (1, 0, 2))
    return Reshape(parts, (count, *sizes))
