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
from graphllm.rewrite import PassReport, Unit, bound, is_implemented, only_user, register_pass, sum_with
from graphllm.weights.plan.plan import WeightPlan


@register_pass(numerics="reorders")
def fuse_linear(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn linear layers into `fused_linear` or `linear_add_norm` where an implementation takes them."""
    notes: list[str] = []
    for node in list(unit.graph.nodes):
        given = bound(node, linear)
        if given is None:
            continue
        one_row = _one_row(node) and not config.deterministic
        forms = itertools.chain(_forms_with_adapters(node, given, one_row), _forms(node, given, one_row))
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


def _forms_with_adapters(node: Node, given: dict[str, Any], one_row: bool) -> Iterator[_Form]:
    """The ways in which `add_lora` joins, if nothing else reads the product."""
    user = only_user(node)
    added = bound(user, add_lora) if user is not None else None
    if user is not None and added is not None and added["y_TO"] is node and added["x_TI"] is given["x_TI"]:
        tables = {n: added[n] for n in ("a_LRI", "b_LrO", "adapter_ids_T", "widths")}
        for form in _forms(user, given | tables, one_row, {node, user}):
            at = form.parts.index("linear") + 1
            yield form._replace(parts=(*form.parts[:at], "adapters", *form.parts[at:]))


def _forms(node: Node, given: dict[str, Any], one_row: bool, readers: Collection[Node] = ()) -> Iterator[_Form]:
    """The ways to fuse a linear layer, the largest first.

    node: the layer's result, with adapters the call that adds them.
    one_row: whether it is for one row, and other rows need not be computed in the same way.
    readers: nodes that read x and all join; only the node if not given.
    """
    before = bound(given["x_TI"], rms_norm)
    user = only_user(node)
    sums = user if user is not None and op_of(user.target) is all_reduce else None
    add, residual = sum_with(sums or node)
    norm = None if add is None else next((u for u in add.users if _is_norm_of(u, add)), None)
    if add is not None and norm is not None and before is None and not (sums is None and one_row):
        after = rms_norm.bind(norm.args, norm.kwargs)
        arguments = given | {"residual_TO": residual, "norm_O": after["weight"], "eps": after["eps"]}
        parts = ["linear", "residual", "norm"]
        if sums is not None:
            arguments["ranks"] = all_reduce.bind(sums.args, sums.kwargs)["ranks"]
            parts.insert(1, "all_reduce")
        yield _Form(linear_add_norm, arguments, (add, norm), tuple(parts), sums)
    if before is not None and (before["offset"] or set(given["x_TI"].users) != {node, *readers}):
        before = None
    gate = user if user is not None and op_of(user.target) is swiglu else None
    for with_norm, gated, with_sum in itertools.product((True, False), repeat=3):
        last = gate if gated else node
        add, residual = sum_with(last) if last is not None else (None, None)
        if last is None or (with_norm and before is None) or (with_sum and add is None):
            continue
        arguments, parts = {**given, "gated": gated}, ["linear"]
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


def _is_norm_of(node: Node, x: Node) -> bool:
    norm = bound(node, rms_norm)
    return norm is not None and norm["x"] is x and not norm["offset"]


def _one_row(node: Node) -> bool:
    rows = node.meta["val"].shape[0]
    return isinstance(rows, int) and rows == 1
