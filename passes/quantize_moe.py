"""quantize_moe: layers of experts read encoded weights, the matrices of each by themselves, in graph and plan: those
that the checkpoint stores encoded as they are stored, others in the encoding that was asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import Op, all_ops, op_of
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.encodings import Encoding, encoding_of
from graphllm.weights.plan.expr import Encode, Expr, Read, Reshape, Rounded, Slice, Stack, Values, walk
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.schemes import is_read, wanted_encoding
from graphllm.weights.plan.simplify import rows_moved, same_encodings, simplify


@register_pass(numerics="changes")
def quantize_moe(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn `fused_moe` into the op that reads an encoding where nothing else of the unit reads both stacks of matrices:
    that in which the checkpoint stores them, or an equal one; else the wanted one, if gates and ups begin at its
    blocks."""
    notes = []
    for node in list(unit.graph.nodes):
        if op_of(node.target) is not fused_moe:
            continue
        given = fused_moe.bind(node.args, node.kwargs)
        stacks = [given.pop("gate_up_N2FD"), given.pop("down_NDF")]
        if given["form"] or not all(_may_change(unit, s, node) for s in stacks):
            continue
        names = [s.meta["label"].removeprefix("w.") for s in stacks]
        found = {_encoding(plan, entry, config) for name in names for entry in unit.entries(name)}
        inner = int(stacks[1].meta["val"].shape[2])
        if len(found) != 1 or (chosen := found.pop()) is None:
            continue
        if not is_read(encoding := encoding_of(chosen), encoding.moe_op, config):
            for entry in (entry for name in names for entry in unit.entries(name)):
                plan = plan.replace(entry, replace(plan[entry], expr=_rounded(plan, entry, chosen)))
            notes += [f"{name}: numbers of {chosen}" for name in names]
            continue
        if inner % encoding.block[0]:
            continue
        parts = []
        for stack, name in zip(stacks, names, strict=True):
            for entry in unit.entries(name):
                plan = _encode_entry(plan, entry, encoding)
            parts.append(_inputs(unit, stack, name, encoding))
            notes.append(f"{name}: {encoding.name}")
        op = all_ops()[str(encoding.moe_op)]
        unit.replace(node, op, **_call(encoding, op, parts, given, inner))
        for stack in stacks:
            unit.graph.erase_node(stack)
    return PassReport(len(notes), tuple(notes), plan if notes else None)


def _call(encoding: Encoding, op: Op, parts: list[list[Node]], given: dict[str, Any], inner: int) -> dict[str, Any]:
    """The arguments of the op that reads an encoding."""
    if not encoding.moe_arguments:
        x_TD = given["x_TD"]
        rest = {n: v for n, v in given.items() if n in op.signature.parameters and n != "x_TD"}
        return op.bind((x_TD, *parts[0], *parts[1]), {**rest, "inner": inner})
    named = dict(zip(itertools.chain(*encoding.moe_arguments), itertools.chain(*parts), strict=True))
    return op.bind((), {**given, **named, **encoding.settings})


def _encoding(plan: WeightPlan, entry: str, config: CompileConfig) -> str | None:
    """The encoding in which a stack is to be read; None for what is not to change."""
    expr = plan.expr_of(entry)
    for name in same_encodings(_expert(expr, 0)):
        encoding = encoding_of(name)
        if is_read(encoding, encoding.moe_op, config):
            return name
    return wanted_encoding(plan, entry, config) if _is_plain(plan, entry) else None


def _may_change(unit: Unit, stack: Any, user: Node) -> bool:
    """Whether a value is a weight that one node reads."""
    label = stack.meta["label"] if stack.op == "placeholder" else ""
    return label.startswith("w.") and list(stack.users) == [user]


def _is_plain(plan: WeightPlan, entry: str) -> bool:
    leaves = list(walk(plan.expr_of(entry)))
    computed = any(isinstance(e, (Values, Encode, Rounded)) for e in leaves)
    return not computed and any(isinstance(e, Read) for e in leaves)


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


def _rounded(plan: WeightPlan, entry: str, encoding: str) -> Expr:
    """A stack of the numbers that an encoding would keep of each expert's matrix."""
    expr = plan.expr_of(entry)
    return Stack(tuple(Rounded(encoding, _expert(expr, n)) for n in range(plan[entry].shape[0])))


def _expert(expr: Expr, n: int) -> Expr:
    """The matrix of one expert of a stack."""
    one = Slice(rows_moved(expr), 0, n, n + 1)
    return simplify(Reshape(one, one.shape[1:]))


def _inputs(unit: Unit, stack: Node, name: str, encoding: Encoding) -> list[Node]:
    """The parts of a stack as inputs of the unit."""
    N, rows, inner = (int(n) for n in stack.meta["val"].shape)
    made = []
    for part in encoding.parts:
        spec = TensorSpec.contiguous(part.dtype, N, *part.shape(rows, inner))
        made.append(unit.input(f"w.{name}.{part.name}", spec, before=stack))
    return made
