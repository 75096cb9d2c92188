"""Shards: how tensor parallelism divides the weights, by what the graph does with their results.

A projection makes "output" shares if everything that reads its results works on heads, or on entries one by one, up to
projections that sum over them ("input"). Projections of attention count by heads. transformers' plan says where else
such a pair begins; where it says nothing, a pair with only activations in between is one, too.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.recognize.draft import (
    Draft,
    args_of,
    argument,
    aten,
    extents,
    is_pointwise,
    is_tensor,
    own_op,
    value,
)  # fmt: skip
from graphllm.compile.transformers_model.recognize.linears import projection_of
from graphllm.ops.activations.geglu import geglu
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.attention.rope import rope
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm
from graphllm.ops.norms.rms_norm import rms_norm

_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
_OF_HEADS = frozenset((
    aten.reshape.default, aten.slice.Tensor, aten.select.int, aten.split_with_sizes.default, operator.getitem,
    aten.cat.default, aten.unsqueeze.default, aten.stack.default,
))  # fmt: skip


def divide_weights(draft: Draft, plan: Mapping[str, str]) -> None:
    """Set `shard`, `heads` and `segments` of the weights. plan: transformers' word for each pattern of module names."""
    _vocabulary(draft)
    heads = _heads(draft)
    starts = dict.fromkeys(heads, True) | {n: False for n in _beginnings(draft, plan) if n not in heads}
    backwards = [n for n in reversed(list(draft.graph.nodes)) if n in starts]
    while True:  # later ones first: where a pair ends, none begins
        blocked = next((s for s in backwards if s in starts and not _reaches(draft, s, starts)), None)
        if blocked is None:
            break
        if starts.pop(blocked):
            draft.note(_names(draft, blocked), "its results are read as a whole: every rank computes all of them")
    divided = {n for s in starts for n in _divided(s)}
    for start in starts:
        given = linear.bind(start.args, start.kwargs)
        how: dict[str, Any] = {"shard": "output"}
        if start in heads:
            segments, counts = heads[start]
            how |= {"heads": counts, "segments": segments}
        elif (parts := _parts(start)) and draft.weight_of(given["weight_OI"]) is not None:
            how["segments"] = parts
        for name in ("weight_OI", "bias_O"):
            if draft.weight_of(given[name]) is not None:
                draft.change(given[name], **how)
    for node in divided:
        _divide_operands(draft, node, divided)


def _vocabulary(draft: Draft) -> None:
    """The table of the tokens, and the matrix that makes logits."""
    for call in draft.calls(embedding):
        given = embedding.bind(call.args, call.kwargs)
        if given["token_ids_T"].target == "in.token_ids":
            draft.change(given["table_VD"], shard="vocab")
    if not any(n.target == "in.logits_indices" for n in draft.graph.find_nodes(op="placeholder")):
        return
    results: Any = draft.graph.output_node().args[0]
    node: Any = results[0]
    while isinstance(node, Node) and node.op == "call_function" and own_op(node) is not linear:
        node = next((a for a in node.all_input_nodes if is_tensor(a) and value(a).dim() == 2), None)
    if isinstance(node, Node) and own_op(node) is linear:
        given = linear.bind(node.args, node.kwargs)
        for name in ("weight_OI", "bias_O"):
            if draft.weight_of(given[name]) is not None:
                draft.change(given[name], shard="vocab")


def _heads(draft: Draft) -> dict[Node, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The projections of attention: segments and heads of each."""
    parts: dict[Node, dict[int, tuple[int, int]]] = {}
    for attention in draft.calls(leaf_ops.attention):
        found = [(projection_of(a), int(extents(a)[1])) for a in args_of(attention)[:3]]
        if any(f is None for f, _ in found):
            continue
        for (call, start, width), count in ((f, n) for f, n in found if f is not None):
            parts.setdefault(call, {})[start] = (width, count)
    made = {}
    for call, pieces in parts.items():
        ordered = [pieces[start] for start in sorted(pieces)]
        widths, counts = tuple(w for w, _ in ordered), tuple(c for _, c in ordered)
        if sum(widths) == value(call).shape[1] and all(w % c == 0 for w, c in ordered):
            made[call] = (widths if len(widths) > 1 else (), counts)
    return made


def _beginnings(draft: Draft, plan: Mapping[str, str]) -> list[Node]:
    """Other linears that may make shares of outputs, those of the plan first."""
    calls = [c for c in draft.calls(linear) if _shard(draft, c) is None]
    named = [c for c in calls if _word(draft, c, plan) in _COLUMNS]
    return named + [c for c in calls if not _word(draft, c, plan) and c not in named and _only_entries(c)]


def _parts(call: Node) -> tuple[int, ...]:
    """How many results those who read a linear take at a time, one part after the other."""
    width = int(value(call).shape[1])
    if any(own_op(u) in (swiglu, geglu) for u in call.users):
        return (width // 2, width // 2)
    cuts = {args_of(u)[2:4] for u in call.users if u.target is aten.slice.Tensor}
    bounds = sorted({0, width, *(c for cut in cuts for c in cut)})
    sizes = tuple(b - a for a, b in itertools.pairwise(bounds))
    return sizes if len(sizes) > 1 else ()


def _shard(draft: Draft, call: Node) -> str | None:
    weight = draft.weight_of(linear.bind(call.args, call.kwargs)["weight_OI"])
    return "vocab" if weight is None else weight.shard


def _word(draft: Draft, call: Node, plan: Mapping[str, str]) -> str:
    """transformers' word for the modules that a linear is made of, or an empty text."""
    weight = draft.weight_of(linear.bind(call.args, call.kwargs)["weight_OI"])
    names = [s for s in (weight.sources if weight else ()) if isinstance(s, str)]
    words = {w for name in names for pattern, w in plan.items() if _matches(pattern, name.rpartition(".")[0])}
    return words.pop() if len(words) == 1 else ""


def _matches(pattern: str, module: str) -> bool:
    names = re.escape(pattern).replace(r"\*", r"[^.]+")
    return re.search(rf"(^|\.){names}$", module) is not None


def _only_entries(call: Node) -> bool:
    """Whether nothing but activations and products of entries lies between a linear and further ones."""
    between = _divided(call)
    return all(
        n is call or is_pointwise(n) or own_op(n) in (swiglu, geglu, rms_norm) or n.target is aten.slice.Tensor
        for n in between
    )


def _divided(start: Node) -> list[Node]:
    """A linear and the values that have shares of its outputs."""
    found = {start: None}
    for node in found_in_order(start, found):
        found[node] = None
    return list(found)


def found_in_order(start: Node, found: dict[Node, None]) -> list[Node]:
    """The values that depend on a linear, up to further linears."""
    made: list[Node] = []
    waiting = [start]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user not in made and user.op == "call_function" and own_op(user) is not linear:
                made.append(user)
                waiting.append(user)
    return made


def _reaches(draft: Draft, start: Node, starts: Mapping[Node, bool]) -> bool:
    """Whether shares of a linear's outputs suffice for all that reads them."""
    divided = {n for s in starts for n in _divided(s)}
    if (weight := draft.weight_of(linear.bind(start.args, start.kwargs)["weight_OI"])) is None or weight.expert_axis:
        return False
    for node in _divided(start):
        if node is not start and not _works_on_shares(draft, node, divided):
            return False
        for user in node.users:
            if user.op == "output":
                return False
            if own_op(user) is linear:
                given = linear.bind(user.args, user.kwargs)
                if user in starts or given["x_TI"] is not node or draft.weight_of(given["weight_OI"]) is None:
                    return False
    return True


def _works_on_shares(draft: Draft, node: Node, divided: set[Node]) -> bool:
    op = own_op(node)
    if op in (rope, swiglu, geglu):
        return True
    if op is rms_norm or op is layer_norm:
        rows = op.bind(node.args, node.kwargs)["x"]
        return value(rows).dim() == 3 or op is rms_norm
    if node.target is leaf_ops.attention:
        return divided.issuperset(args_of(node)[:3])
    if node.target in _OF_HEADS:
        return True
    if not is_pointwise(node):
        return False
    return all(a in divided or _broadcasts(draft, a, node) for a in node.all_input_nodes)


def _broadcasts(draft: Draft, operand: Node, node: Node) -> bool:
    """Whether an operand is the same for all entries, or a parameter that can be divided like them."""
    if not is_tensor(operand) or value(operand).dim() == 0 or extents(operand)[-1] == 1:
        return is_tensor(operand)
    if (parameter := _parameter(draft, operand)) is not None:
        return value(parameter).dim() == value(node).dim() - 1
    rank = value(node).dim()
    return rank == 3 and value(operand).dim() == 3 and extents(operand)[1] == 1


def _divide_operands(draft: Draft, node: Node, divided: set[Node]) -> None:
    """The parameters that are read together with shares."""
    for user in node.users:
        if own_op(user) is linear:
            weight = linear.bind(user.args, user.kwargs)["weight_OI"]
            draft.change(weight, shard="input")
    if own_op(node) is rms_norm:
        given = rms_norm.bind(node.args, node.kwargs)
        if value(given["x"]).dim() == 2 and draft.weight_of(given["weight"]) is not None:
            draft.change(given["weight"], shard="output", heads=_heads_of_row(node))
    elif node.target is leaf_ops.attention:
        sinks = argument(node, 6, "sinks")
        if draft.weight_of(sinks) is not None:
            draft.change(sinks, shard="output", heads=(int(extents(node)[1]),))
    elif is_pointwise(node):
        for operand in node.all_input_nodes:
            parameter = _parameter(draft, operand)
            if parameter is None or value(parameter).dim() != value(node).dim() - 1 or extents(parameter)[-1] == 1:
                continue
            heads = () if value(parameter).dim() == 1 else (int(extents(parameter)[0]),)
            draft.change(parameter, shard="output", heads=heads)


def _parameter(draft: Draft, node: Node) -> Node | None:
    """The parameter that an operand is, maybe in another dtype."""
    while node.op == "call_function" and node.target is aten.to.dtype:
        node = args_of(node)[0]
    return node if draft.weight_of(node) is not None else None


def _heads_of_row(norm: Node) -> tuple[int, ...]:
    """How many heads a normalized row has: it is split into them, or was joined of them."""
    rows = rms_norm.bind(norm.args, norm.kwargs)["x"]
    beside = [u for u in norm.users if u.target is aten.reshape.default]
    beside += args_of(rows)[:1] if rows.target is aten.reshape.default else []
    return next(((int(extents(n)[1]),) for n in beside if value(n).dim() == 3), ())


def _names(draft: Draft, call: Node) -> str:
    return draft.name_of(linear.bind(call.args, call.kwargs)["weight_OI"])
