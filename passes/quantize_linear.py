"""quantize_linear: the weights of linear layers and heads become packed integers, in graph and weight plan."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.op import op_of
from graphllm.ops.linear import linear
from graphllm.ops.quant_linear import quant_linear
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.formats import FORMATS, Format
from graphllm.weights.plan import Entry, Made, Quantize, Read, WeightPlan


@register_pass(numerics="changes")
def quantize_linear(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn `linear` into `quant_linear` where the weight is a matrix that is read from the checkpoint and that nothing
    else of the unit reads. A weight tied to another one, such as a head's to the embedding, gets a
    quantized copy of its own."""
    if config.quantization is None:
        return PassReport(0)
    fmt, notes = FORMATS[config.quantization], []
    for weight in unit.graph.find_nodes(op="placeholder"):
        calls = [_arguments(user, weight) for user in weight.users]
        taken = [a for a in calls if a is not None]
        name = weight.meta["label"].removeprefix("w.")
        if not taken or len(taken) < len(calls) or name == weight.meta["label"]:
            continue
        if not all(_is_read(plan, entry) for entry in unit.entries(name)):
            continue
        for entry in unit.entries(name):
            plan = _quantize_entry(plan, entry, fmt)
        packed = _inputs(unit, weight, name, fmt)
        for node, arguments in zip(list(weight.users), taken, strict=True):
            unit.replace(node, quant_linear, **packed, **arguments)
        unit.graph.erase_node(weight)
        notes.append(f"{name}: {fmt.name}")
    return PassReport(len(notes), tuple(notes), plan if notes else None)


def _arguments(node: Node, weight: Node) -> dict[str, Any] | None:
    """What `quant_linear` takes beside the weight to do the same, or None for another use of the weight."""
    if op_of(node.target) is not linear:
        return None
    found = linear.bind(node.args, node.kwargs)
    of = found.pop("weight_OI")
    return found if of is weight and weight not in found.values() else None


def _is_read(plan: WeightPlan, entry: str) -> bool:
    return len(plan[entry].shape) == 2 and all(isinstance(s, Read) for s in plan.steps_of(entry))


def _quantize_entry(plan: WeightPlan, name: str, fmt: Format) -> WeightPlan:
    """The plan with values and scales, made from the same reads, instead of the entry."""
    rows, inner = plan[name].shape
    values, scales = f"{name}.values", f"{name}.scales"
    steps = (*plan.steps_of(name), Quantize(fmt.name, (rows, inner), scales))
    return plan.replace(
        name,
        Entry(values, fmt.values_shape(rows, inner), fmt.dtype, steps),
        Entry(scales, fmt.scales_shape(rows, inner), "bfloat16", (Made(values),)),
    )


def _inputs(unit: Unit, weight: Node, name: str, fmt: Format) -> dict[str, Any]:
    """Values and scales as inputs of the unit, and the rows of the weight."""
    rows, inner = weight.meta["val"].shape
    parts = {
        "values": (fmt.values_shape(rows, inner), getattr(torch, fmt.dtype)),
        "scales": (fmt.scales_shape(rows, inner), torch.bfloat16),
    }
    made = {}
    for part, (shape, dtype) in parts.items():
        with unit.graph.inserting_before(weight):
            made[part] = unit.graph.placeholder(f"{weight.name}_{part}")
        with unit.shapes.mode:
            fake = torch.empty(shape, dtype=dtype, device=unit.shapes.device)
        made[part].meta.update(val=fake, label=f"w.{name}.{part}")
    return {"values_BGLRQ": made["values"], "scales_BGR": made["scales"], "rows": rows}
