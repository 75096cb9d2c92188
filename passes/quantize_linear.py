"""quantize_linear: linear layers, heads and embeddings read encoded weights, in graph and weight plan: those that the
checkpoint stores encoded as they are stored, others in the encoding that was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import Op, all_ops, op_of
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.rewrite import PassReport, Unit, register_pass
from graphllm.weights.encodings import Encoding, encoding_of
from graphllm.weights.plan.expr import Concat, Encode, Expr, Read, Rounded, Slice, Tie, Values, walk
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.schemes import is_read, wanted_encoding
from graphllm.weights.plan.simplify import in_stored_rows, same_encodings, simplify

aten = torch.ops.aten


class _Piece(NamedTuple):
    """Rows of a matrix, up to ``stop``, that are kept in one encoding."""

    stop: int
    encoding: str


@register_pass(numerics="changes")
def quantize_linear(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn `linear` into the op that reads an encoding where the weight is a matrix of the checkpoint that nothing else
    of the unit reads. A weight tied to another one, such as a head's to the embedding, gets an encoded copy of its own,
    unless both are encoded alike. Where the checkpoint stores parts of a merged weight in different encodings, each
    part has a product of its own. Where no op reads the wanted encoding, the weight takes the numbers that it would
    keep. `embedding` looks up rows of an encoded table, if the checkpoint stores it so."""
    notes = []
    for weight in unit.graph.find_nodes(op="placeholder"):
        name = weight.meta["label"].removeprefix("w.")
        if name == weight.meta["label"] or not weight.users:
            continue
        if (calls := _calls(linear, weight, "weight_OI")) is not None:
            found = {_pieces(plan, entry, config) for entry in unit.entries(name)}
        elif (calls := _calls(embedding, weight, "table_VD")) is not None:
            found = {_table(plan, entry, config) for entry in unit.entries(name)}
        else:
            continue
        if len(found) != 1 or not (pieces := found.pop()):
            continue
        if not all(is_read(e := encoding_of(piece.encoding), e.op, config) for piece in pieces):
            for entry in unit.entries(name):
                plan = plan.replace(entry, replace(plan[entry], expr=Rounded(pieces[0].encoding, plan.expr_of(entry))))
            notes.append(f"{name}: numbers of {pieces[0].encoding}")
            continue
        for entry in unit.entries(name):
            plan = _encode_entry(plan, entry, pieces)
        inputs = _inputs(unit, weight, name, pieces)
        for node, given in calls.items():
            if "token_ids_T" in given:
                _look_up(unit, node, given, pieces[0], inputs[0])
            else:
                _multiply(unit, node, given, pieces, inputs)
        unit.graph.erase_node(weight)
        notes += [f"{_part_name(name, i, pieces)}: {piece.encoding}" for i, piece in enumerate(pieces)]
    return PassReport(len(notes), tuple(notes), plan if notes else None)


def _calls(op: Op, weight: Node, argument: str) -> dict[Node, dict[str, Any]] | None:
    """The calls of an op that read the weight, with their other arguments; None where there are other uses."""
    calls = {}
    for user in weight.users:
        if op_of(user.target) is not op:
            return None
        given = op.bind(user.args, user.kwargs)
        if given.pop(argument) is not weight or weight in given.values():
            return None
        calls[user] = given
    return calls


def _pieces(plan: WeightPlan, entry: str, config: CompileConfig) -> tuple[_Piece, ...]:
    """How a matrix is to be read: as the checkpoint stores it, or in encodings equal to that, if ops read it so; else
    in the wanted encoding. Empty for what is not to change."""
    expr, shape = in_stored_rows(plan.expr_of(entry)), plan[entry].shape
    if len(shape) != 2:
        return ()
    if (name := _stored(expr, config)) is not None:
        return (_Piece(shape[0], name),)
    pieces: list[_Piece] = []
    for part in expr.parts if isinstance(expr, Concat) and expr.dim == 0 else ():
        stop = part.shape[0] + (pieces[-1].stop if pieces else 0)
        name = _stored(part, config)
        if name is None:
            break
        begun = pieces[-2].stop if len(pieces) > 1 else 0
        if pieces and pieces[-1].encoding == name and (pieces[-1].stop - begun) % encoding_of(name).block[0] == 0:
            pieces.pop()
        pieces.append(_Piece(stop, name))
    if pieces and pieces[-1].stop == shape[0]:
        return tuple(pieces)
    leaves = list(walk(expr))
    if any(isinstance(e, (Values, Encode, Rounded)) for e in leaves) or not any(isinstance(e, Read) for e in leaves):
        return ()
    wanted = wanted_encoding(plan, entry, config)
    return () if wanted is None else (_Piece(shape[0], wanted),)


def _table(plan: WeightPlan, entry: str, config: CompileConfig) -> tuple[_Piece, ...]:
    """The same for a table of rows, which are not rounded."""
    name = _stored(plan.expr_of(entry), config)
    return (_Piece(plan[entry].shape[0], name),) if name is not None and encoding_of(name).row_op else ()


def _stored(expr: Expr, config: CompileConfig) -> str | None:
    """The encoding in which the checkpoint stores a matrix, or an equal one, that an op reads."""
    for name in same_encodings(expr):
        encoding = encoding_of(name)
        if is_read(encoding, encoding.op, config):
            return name
    return None


def _multiply(
    unit: Unit, node: Node, given: dict[str, Any], pieces: tuple[_Piece, ...], inputs: list[list[Node]]
) -> None:
    """The op that reads an encoding in the place of `linear`, one for each piece."""
    x_TI, bias, made, start = given["x_TI"], given["bias_O"], [], 0
    for piece, parts in zip(pieces, inputs, strict=True):
        encoding = encoding_of(piece.encoding)
        op = all_ops()[str(encoding.op)]
        if len(pieces) == 1:
            unit.replace(node, op, **_call(encoding, op, x_TI, parts, piece.stop, bias))
            return
        own = None if bias is None else unit.insert(node, aten.slice.Tensor, bias, 0, start, piece.stop)
        call = _call(encoding, op, x_TI, parts, piece.stop - start, own)
        made.append(unit.insert(node, op.overload, **call))
        start = piece.stop
    node.replace_all_uses_with(unit.insert(node, aten.cat.default, made, 1))
    unit.graph.erase_node(node)


def _look_up(unit: Unit, node: Node, given: dict[str, Any], piece: _Piece, parts: list[Node]) -> None:
    """The op that looks up rows in the place of `embedding`."""
    encoding, dtype = encoding_of(piece.encoding), str(node.meta["val"].dtype).removeprefix("torch.")
    op = all_ops()[str(encoding.row_op)]
    named = {"dtype": dtype, "scale": given["scale"], **encoding.settings}
    unit.replace(node, op, **op.bind((given["token_ids_T"], *parts), named))


def _call(encoding: Encoding, op: Op, x_TI: Any, parts: list[Node], rows: int, bias_O: Any) -> dict[str, Any]:
    """The arguments of the op that reads an encoding."""
    if not encoding.arguments:
        return op.bind((x_TI, *parts), {"rows": rows, "bias_O": bias_O, **encoding.settings})
    named = dict(zip(encoding.arguments, parts, strict=True))
    return op.bind((x_TI,), {**named, "bias_O": bias_O, **encoding.settings})


def _part_name(name: str, number: int, pieces: tuple[_Piece, ...]) -> str:
    return name if len(pieces) == 1 else f"{name}.{number}"


def _encode_entry(plan: WeightPlan, name: str, pieces: tuple[_Piece, ...]) -> WeightPlan:
    """The plan with the parts of the encoded matrix instead of the entry; a tie where another entry is the same."""
    old, expr, start, made = plan[name], in_stored_rows(plan.expr_of(name)), 0, []
    for number, (stop, chosen) in enumerate(pieces):
        rows = expr if len(pieces) == 1 else simplify(Slice(expr, 0, start, stop))
        encoding, shape = encoding_of(chosen), (stop - start, old.shape[1])
        for part in encoding.parts:
            of: Expr = Encode(encoding.name, part.name, rows)
            same = next((e.name for e in plan if e.expr == of), None)
            made.append(
                Entry(
                    f"{_part_name(name, number, pieces)}.{part.name}", part.shape(*shape), part.dtype,
                    of if same is None else Tie(same), old.shard, old.segments, old.expert_axis,
                )
            )  # fmt: skip
        start = stop
    return plan.replace(name, *made)


def _inputs(unit: Unit, weight: Node, name: str, pieces: tuple[_Piece, ...]) -> list[list[Node]]:
    """The parts of the weight, of each of its pieces, as inputs of the unit."""
    inner, start, made = int(weight.meta["val"].shape[1]), 0, []
    for number, (stop, chosen) in enumerate(pieces):
        parts = []
        for part in encoding_of(chosen).parts:
            label = f"{_part_name(name, number, pieces)}.{part.name}"
            spec = TensorSpec.contiguous(part.dtype, *part.shape(stop - start, inner))
            parts.append(unit.input(f"w.{label}", spec, before=weight))
        made.append(parts)
        start = stop
    return made
