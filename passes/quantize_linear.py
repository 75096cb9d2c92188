"""quantize_linear: linear layers and heads read encoded weights, in graph and weight plan: those that the checkpoint
stores encoded as they are stored, others in the encoding that was asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.op import Op, all_ops, op_of
from graphllm.ops.linear import linear
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.encodings import Encoding, encoding_of
from graphllm.weights.expr import Encode, Read, Values, walk
from graphllm.weights.plan import Entry, WeightPlan
from graphllm.weights.schemes import wanted_encoding
from graphllm.weights.simplify import same_encodings


@register_pass(numerics="changes")
def quantize_linear(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn `linear` into the op that reads an encoding where the weight is a matrix of the checkpoint that nothing else
    of the unit reads. A weight tied to another one, such as a head's to the embedding, gets an encoded copy of its own.
    """
    notes = []
    for weight in unit.graph.find_nodes(op="placeholder"):
        calls = [_arguments(user, weight) for user in weight.users]
        taken = [a for a in calls if a is not None]
        name = weight.meta["label"].removeprefix("w.")
        if not taken or len(taken) < len(calls) or name == weight.meta["label"]:
            continue
        found = {_encoding(plan, entry, config) for entry in unit.entries(name)}
        if len(found) != 1 or (chosen := found.pop()) is None:
            continue
        encoding = encoding_of(chosen)
        for entry in unit.entries(name):
            plan = _encode_entry(plan, entry, encoding)
        parts, rows = _inputs(unit, weight, name, encoding), int(weight.meta["val"].shape[0])
        for node, arguments in zip(list(weight.users), taken, strict=True):
            op = all_ops()[str(encoding.op)]
            unit.replace(node, op, **_call(encoding, op, arguments["x_TI"], parts, rows, arguments["bias_O"]))
        unit.graph.erase_node(weight)
        notes.append(f"{name}: {encoding.name}")
    return PassReport(len(notes), tuple(notes), plan if notes else None)


def _arguments(node: Node, weight: Node) -> dict[str, Any] | None:
    """What the op that reads an encoding takes beside the weight to do the same, or None for another use of the
    weight."""
    if op_of(node.target) is not linear:
        return None
    found = linear.bind(node.args, node.kwargs)
    of = found.pop("weight_OI")
    return found if of is weight and weight not in found.values() else None


def _encoding(plan: WeightPlan, entry: str, config: CompileConfig) -> str | None:
    """The encoding in which an entry is to be read: the checkpoint's own, or an equal one, if an op reads it, else the
    wanted one; None for what is to be left alone."""
    expr = plan.expr_of(entry)
    if len(plan[entry].shape) != 2:
        return None
    for name in same_encodings(expr):
        encoding = encoding_of(name)
        if encoding.op is not None and (config.backend == "eager" or config.target.device in encoding.devices):
            return name
    leaves = list(walk(expr))
    if any(isinstance(e, (Values, Encode)) for e in leaves) or not any(isinstance(e, Read) for e in leaves):
        return None
    return wanted_encoding(plan, entry, config)


def _call(encoding: Encoding, op: Op, x_TI: Any, parts: list[Node], rows: int, bias_O: Any) -> dict[str, Any]:
    """The arguments of the op that reads an encoding."""
    if not encoding.arguments:
        return op.bind((x_TI, *parts), {"rows": rows, "bias_O": bias_O})
    named = dict(zip(encoding.arguments, parts, strict=True))
    return op.bind((x_TI,), {**named, "bias_O": bias_O, **encoding.settings})


def _encode_entry(plan: WeightPlan, name: str, encoding: Encoding) -> WeightPlan:
    """The plan with the parts of the encoded matrix instead of the entry."""
    old, expr = plan[name], plan.expr_of(name)
    parts = (
        Entry(
            f"{name}.{part.name}", part.shape(*old.shape), part.dtype, Encode(encoding.name, part.name, expr),
            old.shard, old.segments, old.expert_axis,
        )
        for part in encoding.parts
    )  # fmt: skip
    return plan.replace(name, *parts)


def _inputs(unit: Unit, weight: Node, name: str, encoding: Encoding) -> list[Node]:
    """The parts of the weight as inputs of the unit."""
    rows, inner = (int(n) for n in weight.meta["val"].shape)
    made = []
    for part in encoding.parts:
        with unit.graph.inserting_before(weight):
            node = unit.graph.placeholder(f"{weight.name}_{part.name}")
        with unit.shapes.mode:
            fake = torch.empty(part.shape(rows, inner), dtype=getattr(torch, part.dtype), device=unit.shapes.device)
        node.meta.update(val=fake, label=f"w.{name}.{part.name}")
        made.append(node)
    return made
