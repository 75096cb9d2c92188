"""fuse_linear: what surrounds a linear layer joins it, so that a layer is a few kernels.

How much joins is for the implementations to say: each linear layer becomes the largest of the fused forms that one of
them takes at this place. A single row is normalized again by every program that reads it; more rows are normalized
once, by the kernel that ends the residual branch before. In long steps that also keeps Inductor from copying the
residual to where the library adds the product to it. What adapters add joins where rows are few.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.op import Op, op_of
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.collectives.all_reduce import all_reduce
from graphllm.ops.gemm.fused_linear import fused_linear
from graphllm.ops.gemm.linear import linear
from graphllm.ops.gemm.linear_add_norm import linear_add_norm
from graphllm.ops.lora.add_lora import add_lora
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.rewrite import PassReport, Unit, is_implemented, register_pass
from graphllm.weights.plan.plan import WeightPlan


@register_pass(numerics="reorders")
def fuse_linear(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn linear layers into `fused_linear` or `linear_add_norm` where an implementation takes them."""
    notes: list[str] = []
    for node in list(unit.graph.nodes):
        bound = _bound(node, linear)
        if bound is None:
            continue
        alone = _one_row(node) and not config.deterministic
        forms = itertools.chain(_forms_with_adapters(node, bound, alone), _forms(node, bound, alone))
        form = next((f for f in forms if is_implemented(unit, config, f.op, **f.arguments)), None)
        if form is not None:
            made = unit.replace(form.replaces, form.op, **form.arguments)
            if form.sums is not None:
                unit.graph.erase_node(form.sums)
            notes.append(f"{made.name}: {', '.join(form.parts)}")
    return PassReport(len(notes), tuple(notes))


class _Form(NamedTuple):
    """One way to fuse: the op, its arguments, the nodes that it computes, and what it has in it, for people. sums: the
    sum over ranks among them."""

    op: Op
    arguments: dict[str, Any]
    replaces: Node | tuple[Node, ...]
    parts: tuple[str, ...]
    sums: Node | None = None


def _forms_with_adapters(node: Node, bound: dict[str, Any], alone: bool) -> Iterator[_Form]:
    """The ways in which `add_lora` joins, if that alone reads the product."""
    user = _only_user(node)
    added = _bound(user, add_lora) if user is not None else None
    if user is not None and added is not None and added["y_TO"] is node and added["x_TI"] is bound["x_TI"]:
        tables = {n: added[n] for n in ("a_LRI", "b_LrO", "adapter_ids_T", "widths")}
        for form in _forms(user, bound | tables, alone, {node, user}):
            at = form.parts.index("linear") + 1
            yield form._replace(parts=(*form.parts[:at], "adapters", *form.parts[at:]))


def _forms(node: Node, bound: dict[str, Any], alone: bool, readers: Collection[Node] = ()) -> Iterator[_Form]:
    """The ways to fuse a linear layer whose result is a node's, those that take in more first. alone: whether it is for
    one row, and others need not be computed in the same way. readers: of x, all of which join; the node alone if not
    given."""
    before = _bound(bound["x_TI"], rms_norm)
    user = _only_user(node)
    sums = user if user is not None and op_of(user.target) is all_reduce else None
    add, residual = sum_with(sums or node)
    norm = None if add is None else next((u for u in add.users if _is_norm_of(u, add)), None)
    if add is not None and norm is not None and before is None and not (sums is None and alone):
        after = rms_norm.bind(norm.args, norm.kwargs)
        arguments = bound | {"residual_TO": residual, "norm_O": after["weight"], "eps": after["eps"]}
        parts = ["linear", "residual", "norm"]
        if sums is not None:
            arguments["ranks"] = all_reduce.bind(sums.args, sums.kwargs)["ranks"]
            parts.insert(1, "all_reduce")
        yield _Form(linear_add_norm, arguments, (add, norm), tuple(parts), sums)
    if before is not None and (before["offset"] or set(bound["x_TI"].users) != {node, *readers}):
        before = None
    gate = user if user is not None and op_of(user.target) is swiglu else None
    for with_norm, gated, with_sum in itertools.product((True, False), repeat=3):
        last = gate if gated else node
        add, residual = sum_with(last) if last is not None else (None, None)
        if last is None or (with_norm and before is None) or (with_sum and add is None):
            continue
        arguments, parts = {**bound, "gated": gated}, ["linear"]
        if with_norm and before is not None:
            arguments |= {"x_TI": before["x"], "norm_I": before["weight"], "eps": before["eps"]}
            parts.insert(0, "norm")
        if gated:
            parts.append("gate")
        if with_sum and add is not None and residual is not None:
            arguments["residual_TN"] = residual
            last = add
            parts.append("residual")
        yield _Form(fused_linear, arguments, last, tuple(parts))


def _bound(node: Node, op: Op) -> dict[str, Any] | None:
    return op.bind(node.args, node.kwargs) if op_of(node.target) is op else None


def _is_norm_of(node: Node, x: Node) -> bool:
    bound = _bound(node, rms_norm)
    return bound is not None and bound["x"] is x and not bound["offset"]


def _one_row(node: Node) -> bool:
    rows = node.meta["val"].shape[0]
    return isinstance(rows, int) and rows == 1


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def sum_with(term: Node) -> tuple[Node | None, Node | None]:
    """The plain addition that alone reads a value, and what it adds, another value of that shape and dtype."""
    add = _only_user(term)
    if add is None or add.target is not torch.ops.aten.add.Tensor or add.kwargs:
        return None, None
    others = [a for a in add.args if a is not term]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None, None
    value, own = others[0].meta["val"], term.meta["val"]
    return (add, others[0]) if value.shape == own.shape and value.dtype == own.dtype else (None, None)
