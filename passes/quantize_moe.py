"""quantize_moe: layers of experts read encoded weights, the matrices of each by themselves, in graph and plan."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.op import all_ops, op_of
from graphllm.ops.fused_moe import fused_moe
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.encodings import Encoding, encoding_of
from graphllm.weights.expr import Encode, Expr, Read, Reshape, Slice, Stack, Values, walk
from graphllm.weights.plan import Entry, WeightPlan
from graphllm.weights.simplify import simplify


@register_pass(numerics="changes")
def quantize_moe(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn `fused_moe` into the op that reads the wanted encoding where both stacks of matrices are the checkpoint's
    plain numbers that nothing else of the unit reads, and gates and ups begin at blocks of the encoding."""
    encoding = encoding_of(config.quantization) if config.quantization else None
    if encoding is None or encoding.moe_op is None:
        return PassReport(0)
    op, notes = all_ops()[encoding.moe_op], []
    for node in list(unit.graph.nodes):
        if op_of(node.target) is not fused_moe:
            continue
        given = fused_moe.bind(node.args, node.kwargs)
        stacks = [given.pop("gate_up_N2FD"), given.pop("down_NDF")]
        inner = int(stacks[1].meta["val"].shape[2])
        if inner % encoding.block[0] or not all(_may_change(unit, plan, s, node) for s in stacks):
            continue
        parts = []
        for stack in stacks:
            name = stack.meta["label"].removeprefix("w.")
            for entry in unit.entries(name):
                plan = _encode_entry(plan, entry, encoding)
            parts += _inputs(unit, stack, name, encoding)
            notes.append(f"{name}: {encoding.name}")
        x_TD, rest = given.pop("x_TD"), given
        unit.replace(node, op, **op.bind((x_TD, *parts), {**rest, "inner": inner}))
        for stack in stacks:
            unit.graph.erase_node(stack)
    return PassReport(len(notes), tuple(notes), plan if notes else None)


def _may_change(unit: Unit, plan: WeightPlan, stack: Any, user: Node) -> bool:
    """Whether a value is a weight of numbers that are read, also encoded ones, by one node."""
    label = stack.meta["label"] if stack.op == "placeholder" else ""
    return (
        label.startswith("w.")
        and list(stack.users) == [user]
        and all(_is_plain(plan, entry) for entry in unit.entries(label.removeprefix("w.")))
    )


def _is_plain(plan: WeightPlan, entry: str) -> bool:
    leaves = list(walk(plan.expr_of(entry)))
    computed = any(isinstance(e, (Values, Encode)) for e in leaves)
    return not computed and not plan[entry].exact and any(isinstance(e, Read) for e in leaves)


def _encode_entry(plan: WeightPlan, name: str, encoding: Encoding) -> WeightPlan:
    """The plan with the parts of the encoded matrices of all experts instead of the entry."""
    old, expr = plan[name], plan.expr_of(name)
    N, *matrix = old.shape
    experts = [_expert(expr, n) for n in range(N)]
    parts = (
        Entry(
            f"{name}.{part.name}", (N, *part.shape(*matrix)), part.dtype,
            Stack(tuple(Encode(encoding.name, part.name, expert) for expert in experts)),
            old.shard, (), old.expert_axis,
        )
        for part in encoding.parts
    )  # fmt: skip
    return plan.replace(name, *parts)


def _expert(expr: Expr, n: int) -> Expr:
    """The matrix of one expert of a stack."""
    one = Slice(expr, 0, n, n + 1)
    return simplify(Reshape(one, one.shape[1:]))


def _inputs(unit: Unit, stack: Node, name: str, encoding: Encoding) -> list[Node]:
    """The parts of a stack as inputs of the unit."""
    N, rows, inner = (int(n) for n in stack.meta["val"].shape)
    made = []
    for part in encoding.parts:
        with unit.graph.inserting_before(stack):
            node = unit.graph.placeholder(f"{stack.name}_{part.name}")
        with unit.shapes.mode:
            fake = torch.empty(
                (N, *part.shape(rows, inner)), dtype=getattr(torch, part.dtype), device=unit.shapes.device
            )
        node.meta.update(val=fake, label=f"w.{name}.{part.name}")
        made.append(node)
    return made
