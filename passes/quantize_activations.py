"""quantize_activations: in steps of more than a few rows, linear layers with float8 weights take float8 rows as well.

A few rows are bound by reading the weights and keep x as it is. The norm or gate that makes the rows joins the kernel
that rounds them, where nothing else reads what it makes; or the gate, and the residual, end the product before, where
an implementation takes them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.op import op_of
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.gemm.linear import linear
from graphllm.ops.gemm.quantize_rows import quantize_rows
from graphllm.ops.gemm.scaled_linear import scaled_linear
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.rewrite import (
    PassReport,
    Unit,
    bound,
    bound_once,
    fake_values,
    is_implemented,
    only_user,
    register_pass,
    sum_with,
)
from graphllm.weights.plan.plan import WeightPlan


@register_pass(numerics="changes")
def quantize_activations(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn `linear` with a float8 weight of one scale a row into `quantize_rows` and `scaled_linear` where both have
    implementations."""
    notes: list[str] = []
    for node in list(unit.graph.nodes):
        given = bound(node, linear)
        if given is None or given["form"] != "float8" or given["group"] or given["bias_O"] is not None:
            continue
        rows = _rows(given["x_TI"])
        if not is_implemented(unit, config, quantize_rows, **rows):
            continue
        with unit.graph.inserting_before(node), unit.shapes.mode:
            made = unit.graph.call_function(quantize_rows.overload, kwargs=rows)
            made.meta["val"] = quantize_rows.overload(**fake_values(rows))
            codes, scales = (unit.graph.call_function(operator.getitem, (made, i)) for i in range(2))
            for i, result in enumerate((codes, scales)):
                result.meta["val"] = made.meta["val"][i]
        dtype = str(node.meta["val"].dtype).removeprefix("torch.")
        product = {"codes_TW": codes, "row_scales_T1": scales, "weight_OW": given["weight_OI"],
                   "scales_1O": given["scales_GO"], "dtype": dtype}  # fmt: skip
        forms = (f for f in _forms(node) if is_implemented(unit, config, scaled_linear, **product, **f.more))
        form = next(forms, None)
        if form is None:
            for unused in (scales, codes, made):
                unit.graph.erase_node(unused)
            continue
        name = unit.replace(form.last, scaled_linear, **product, **form.more).name
        if form.last is not node:
            unit.graph.erase_node(node)
        notes.append(f"{name}: {', '.join((*_said(rows), *form.parts))}")
    return PassReport(len(notes), tuple(notes))


class _Form(NamedTuple):
    """What joins a product: the arguments that say so, the node that it then computes, and its name for people."""

    more: dict[str, Any]
    last: Node
    parts: tuple[str, ...]


def _forms(node: Node) -> Iterator[_Form]:
    """The ways to end a linear layer, those that take in more first."""
    user = only_user(node)
    if user is not None and op_of(user.target) is swiglu:
        yield _Form({"gated": True}, user, ("gate",))
    add, residual = sum_with(node)
    if add is not None:
        yield _Form({"residual_TN": residual}, add, ("residual",))
    yield _Form({}, node, ())


def _rows(x: Node) -> dict[str, Any]:
    """Arguments of `quantize_rows` for the rows that a node makes."""
    norm, gate = (bound_once(x, op) for op in (rms_norm, swiglu))
    if norm is not None and not norm["offset"]:
        return {"x_TI": norm["x"], "norm_I": norm["weight"], "eps": norm["eps"], "gated": False}
    if gate is not None:
        return {"x_TI": gate["gate_up_T2F"], "norm_I": None, "eps": 0.0, "gated": True}
    return {"x_TI": x, "norm_I": None, "eps": 0.0, "gated": False}


def _said(rows: dict[str, Any]) -> list[str]:
    return ["norm"] * (rows["norm_I"] is not None) + ["gate"] * rows["gated"] + ["rows of float8", "linear"]
