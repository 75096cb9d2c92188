"""fuse_linear: what surrounds a linear layer joins it, so that a layer is a few kernels.

A single row is normalized again by every program that reads it; more rows are normalized once, by the kernel that ends
the residual branch before. In long steps that also keeps Inductor from copying the residual to where the library adds
the product to it. On a CPU only the gate joins, where there is a kernel for it: the rest takes a few percent of a long
step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from graphllm.compile.lower import choose
from graphllm.compile.passes import PassReport, Stage, Unit, register_pass
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import eliminate_dead
from graphllm.ir.op import CallSite, Op, op_of
from graphllm.ops.fused_linear import fused_linear
from graphllm.ops.linear import linear
from graphllm.ops.linear_add_norm import linear_add_norm
from graphllm.ops.lm_head import lm_head
from graphllm.ops.rms_norm import rms_norm
from graphllm.ops.swiglu import swiglu
from graphllm.weights.plan import WeightPlan


@register_pass(stage=Stage.SPECIALIZE, numerics="reorders", after=("select_early",))
def fuse_linear(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn linear layers of GPU steps in half precision into `fused_linear` or `linear_add_norm`; on a CPU those whose
    result is gated."""
    if config.backend != "inductor" or config.dtype == "float32" or unit.bucket is None:
        return PassReport(0)
    fusion = _Fusion(unit)
    for node in list(unit.graph.nodes):
        if config.target.device == "cpu" and op_of(node.target) is linear:
            fusion.gate(node, config.target, unit.bucket)
        elif config.target.device == "cuda" and op_of(node.target) in (linear, lm_head):
            fusion.fuse(node, one_row=unit.bucket.hi == 1)
    eliminate_dead(unit.graph, keep_inputs=True)
    return PassReport(len(fusion.notes), tuple(fusion.notes))


class _Fusion:
    def __init__(self, unit: Unit) -> None:
        self.unit, self.graph = unit, unit.graph
        self.notes: list[str] = []

    def fuse(self, node: Node, one_row: bool) -> None:
        x, weight, bias = _linear_arguments(node)
        if weight is None:
            return
        normed = _bound(x, rms_norm)
        add, residual = _sum(node)
        if add is not None:
            norm = next(
                (u for u in add.users if (b := _bound(u, rms_norm)) and b["x"] is add and not b["offset"]), None
            )
            if norm is not None and normed is None and not one_row:
                self.end_branch(node, add, norm, (x, weight, bias, residual))
                return
        fused: dict[str, Any] = {"x_TI": x, "weight_OI": weight, "bias_O": bias}
        last, names = node, ["linear"]
        if normed is not None and not normed["offset"] and len(x.users) == 1:
            fused |= {"x_TI": normed["x"], "norm_I": normed["weight"], "eps": normed["eps"]}
            names.insert(0, "norm")
        user = _only_user(last)
        if user is not None and op_of(user.target) is swiglu:
            fused["gated"], last = True, user
            names.append("gate")
            add, residual = _sum(last)
        if add is not None:
            fused["residual_TN"], last = residual, add
            names.append("residual")
        made = self.insert(last, fused_linear, fused)
        last.replace_all_uses_with(made)
        self.notes.append(f"{made.name}: {', '.join(names)}")

    def gate(self, node: Node, target: Target, bucket: Bucket) -> None:
        user = _only_user(node)
        if user is None or op_of(user.target) is not swiglu:
            return
        fused = linear.bind(node.args, node.kwargs) | {"gated": True}
        fakes = torch.fx.map_arg(fused, lambda n: n.meta["val"])
        if choose(fused_linear, CallSite(fused_linear.bind((), fakes), target, bucket)) is None:
            return
        made = self.insert(user, fused_linear, fused)
        user.replace_all_uses_with(made)
        self.notes.append(f"{made.name}: linear, gate")

    def end_branch(self, node: Node, add: Node, norm: Node, given: tuple[Any, ...]) -> None:
        x, weight, bias, residual = given
        bound = rms_norm.bind(norm.args, norm.kwargs)
        arguments = {"x_TI": x, "weight_OI": weight, "residual_TO": residual, "norm_O": bound["weight"],
                     "eps": bound["eps"], "bias_O": bias}  # fmt: skip
        made = self.insert(add, linear_add_norm, arguments)
        with self.graph.inserting_after(made):
            outputs = [self.graph.call_function(operator.getitem, (made, i)) for i in (1, 0)][::-1]
        for i, (output, old) in enumerate(zip(outputs, (add, norm), strict=True)):
            output.meta["val"] = made.meta["val"][i]
            old.replace_all_uses_with(output)
        self.notes.append(f"{made.name}: linear, residual, norm")

    def insert(self, before: Node, op: Op, arguments: dict[str, Any]) -> Node:
        with self.graph.inserting_before(before):
            made = self.graph.call_function(op.overload, kwargs=arguments)
        fakes = torch.fx.map_arg(arguments, lambda n: n.meta["val"])
        with self.unit.shapes.mode:
            made.meta["val"] = op.overload(**fakes)
        return made


def _linear_arguments(node: Node) -> tuple[Any, Any, Any]:
    """x, weight and bias of a linear layer; no weight for a head that caps its logits."""
    if bound := _bound(node, linear):
        return bound["x_TI"], bound["weight_OI"], bound["bias_O"]
    bound = lm_head.bind(node.args, node.kwargs)
    return bound["x_SD"], None if bound["softcap"] else bound["weight_VD"], None


def _bound(node: Node, op: Op) -> dict[str, Any] | None:
    return op.bind(node.args, node.kwargs) if op_of(node.target) is op else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _sum(term: Node) -> tuple[Node | None, Node | None]:
    """The plain addition that alone reads a value, and what it adds, another value of that shape and dtype."""
    add = _only_user(term)
    if add is None or add.target is not torch.ops.aten.add.Tensor or add.kwargs:
        return None, None
    others = [a for a in add.args if a is not term]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None, None
    value, own = others[0].meta["val"], term.meta["val"]
    return (add, others[0]) if value.shape == own.shape and value.dtype == own.dtype else (None, None)
