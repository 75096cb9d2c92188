"""Linears: aten.linear becomes `linear`; projections of the same rows that belong together become one.

Together are the projections of queries, keys and values of one attention, and those of a gate and of what it is
multiplied with. A projection that the checkpoint stores merged gets the segments that its readers take.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
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
    last,
    own_op,
    value,
)  # fmt: skip
from graphllm.ir import Weight
from graphllm.ops.attention.rope import rope
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.weights.plan.expr import Concat, Expr, Read, Repeat, Values

_ACTIVATIONS = frozenset((
    aten.silu.default, aten.gelu.default, aten.relu.default, aten.square.default, aten.sigmoid.default,
    aten.tanh.default, aten.pow.Tensor_Scalar, aten.elu.default, aten.softplus.default, aten.mish.default,
))  # fmt: skip


def find_linears(draft: Draft) -> None:
    """Put `linear` in the places of products of rows with a parameter, and merge those that belong together."""
    for node in draft.calls(aten.linear.default):
        x, weight = args_of(node)[:2]
        bias = argument(node, 2, "bias")
        if is_tensor(x) and value(x).dim() == 2 and draft.weight_of(weight) is not None:
            given = {"x_TI": x, "weight_OI": weight} | ({} if bias is None else {"bias_O": bias})
            draft.replace(node, draft.insert(node, linear, **given))
        else:
            draft.note(node.name, "a product whose rows have further dimensions, or whose matrix is computed")
    for node in draft.calls(aten.addmm.default):
        _transposed(draft, node)
    draft.drop_unread()
    _keep_routers_exact(draft)
    for attention in draft.calls(leaf_ops.attention):
        for rows in args_of(attention)[:3]:
            if isinstance(rows, Node) and rows.target is aten.unsqueeze.default and args_of(rows)[1] == 1:
                _, count, size = extents(rows)  # one head
                draft.replace(rows, draft.insert(rows, aten.reshape.default, args_of(rows)[0], [-1, count, size]))
        _merge_projections(draft, attention)
    for product in draft.calls(aten.mul.Tensor):
        _merge_gate(draft, product)
    draft.drop_unread()


def _keep_routers_exact(draft: Draft) -> None:
    """Matrices whose results are chosen from decide, so quantization leaves them as they are."""
    for choice in draft.calls(aten.topk.default, aten.argmax.default):
        waiting: list[Any] = [args_of(choice)[0]]
        while waiting:
            node = waiting.pop()
            if own_op(node) is linear:
                draft.change(linear.bind(node.args, node.kwargs)["weight_OI"], exact=True)
            elif is_pointwise(node) or node.target in (aten.softmax.int, aten.reshape.default):
                waiting += node.all_input_nodes


def _transposed(draft: Draft, node: Node) -> None:
    """A product with a matrix that is stored as [in, out], and a bias."""
    bias, x, matrix = args_of(node)
    stored = draft.weight_of(matrix)
    if stored is None or draft.weight_of(bias) is None or node.kwargs or len(stored.sources) != 1:
        return
    made = replace(stored, shape=stored.shape[::-1], transpose=not stored.transpose)
    weight = draft.weight(f"{draft.name_of(matrix)}_transposed", made)
    draft.replace(node, draft.insert(node, linear, x_TI=x, weight_OI=weight, bias_O=bias))


def projection_of(node: Any) -> tuple[Node, int, int] | None:
    """The `linear` whose results a value [T, H, E] has: it, the first of them, and how many."""
    start, width = 0, 0
    while isinstance(node, Node) and node.op == "call_function":
        op = own_op(node)
        if op is linear:
            size = int(value(node).shape[1])
            return node, start, width or size
        if op is rope or op is rms_norm or op is layer_norm:
            node = op.bind(node.args, node.kwargs)["x_THE" if op is rope else "x"]
        elif node.target is aten.slice.Tensor and last(node, args_of(node)[1]) and len(args_of(node)) == 4:
            if value(node).dim() == 2:
                start, width = args_of(node)[2], args_of(node)[3] - args_of(node)[2]
            node = args_of(node)[0]
        elif node.target in (aten.reshape.default, aten.to.dtype, aten.select.int, aten.clamp.default):
            node = args_of(node)[0]
        elif node.target in (aten.mul.Tensor, aten.div.Tensor):  # by a number, or by a weight of each head
            rows = [n for n in node.all_input_nodes if value(n).dim() == value(node).dim()]
            if len(rows) != 1:
                return None
            (node,) = rows
        else:
            return None
    return None


def _merge_projections(draft: Draft, attention: Node) -> None:
    found = [projection_of(a) for a in args_of(attention)[:3]]
    if any(f is None for f in found):
        return
    calls = [f[0] for f in found if f is not None]
    if len(set(calls)) == 3:
        _merge(draft, calls)
    elif len(set(calls)) == 2:  # a key that is its own value, or two of three stored merged
        draft.note(attention.name, "queries, keys and values are two projections, which stay apart")


def _merge_gate(draft: Draft, product: Node) -> None:
    """The projections of act(gate) * up, in this order."""
    if len(args_of(product)) != 2 or not all(is_tensor(a) for a in args_of(product)):
        return
    for gate, up in (args_of(product), args_of(product)[::-1]):
        under = gate_of(gate)
        if under is not None and own_op(under) is linear and own_op(up) is linear and under is not up:
            if value(under).shape[1] == value(up).shape[1]:
                _merge(draft, [under, up])
            return


def gate_of(node: Any) -> Node | None:
    """What activations are applied to, one after the other; None if there is none."""
    start = node
    while isinstance(node, Node) and node.op == "call_function" and node.target in _ACTIVATIONS:
        node = args_of(node)[0]
    return node if node is not start and isinstance(node, Node) else None


def _merge(draft: Draft, calls: Sequence[Node]) -> None:
    """One product in place of several of the same rows; each becomes a part of its result."""
    given = [linear.bind(c.args, c.kwargs) for c in calls]
    weights = [draft.weight_of(g["weight_OI"]) for g in given]
    biases = [draft.weight_of(g["bias_O"]) for g in given]
    if any(g["x_TI"] is not given[0]["x_TI"] for g in given) or len({extents(g["weight_OI"])[1] for g in given}) != 1:
        return
    names = [draft.name_of(g["weight_OI"]) for g in given]
    if any(len(g["weight_OI"].users) != 1 for g in given) or any(
        g["bias_O"] is not None and b is None for g, b in zip(given, biases, strict=True)
    ):
        draft.note(", ".join(names), "projections of the same rows that others read, too, stay apart")
        return
    sizes = [int(value(c).shape[1]) for c in calls]
    matrix = merged([w for w in weights if w is not None], sizes)
    if matrix is None:
        return
    first = min(calls, key=list(draft.graph.nodes).index)
    arguments = {"x_TI": given[0]["x_TI"], "weight_OI": draft.weight(merged_name(names), matrix)}
    if any(b is not None for b in biases):
        bias = _merged_bias(biases, sizes)
        own = [draft.name_of(g["bias_O"]) or f"{n}_bias" for g, n in zip(given, names, strict=True)]
        arguments["bias_O"] = draft.weight(merged_name(own), bias)
    made = draft.insert(first, linear, **arguments)
    start = 0
    for call, size in zip(calls, sizes, strict=True):
        part = draft.insert(first, aten.slice.Tensor, made, 1, start, start + size)
        draft.replace(call, part)
        start += size


def merged(weights: Sequence[Weight], sizes: Sequence[int]) -> Weight | None:
    """Matrices, or biases, one after the other. None where they are not described alike."""
    first, plain = weights[0], all(w.sources and w.expr is None for w in weights)
    if len({(w.transpose, w.dtype, w.encoding) for w in weights}) != 1 or any(w.tie or w.slice_rows for w in weights):
        return None
    shape = (sum(sizes), *first.shape[1:])
    if plain and all(len(w.sources) == 1 for w in weights):
        return replace(first, shape=shape, sources=tuple(w.sources[0] for w in weights), segments=tuple(sizes))
    if first.transpose or first.encoding:
        return None
    expr = Concat(tuple(map(expression, weights)))
    return replace(first, shape=shape, sources=(), expr=expr, segments=tuple(sizes))


def expression(weight: Weight) -> Expr:
    """What makes a weight of one source, without a transpose."""
    if isinstance(weight.expr, Expr):
        return weight.expr
    (source,) = weight.sources
    return Read((source,) if isinstance(source, str) else source, weight.shape)


def _merged_bias(biases: Sequence[Weight | None], sizes: Sequence[int]) -> Weight:
    """Biases one after the other, zeros for one that is missing."""
    there = [b for b in biases if b is not None]
    if len(there) == len(biases) and (whole := merged(there, sizes)) is not None:
        return whole
    zeros = Values((0.0,), (1,))
    parts = [Repeat(zeros, 0, n) if b is None else expression(b) for b, n in zip(biases, sizes, strict=True)]
    return replace(there[0], shape=(sum(sizes),), sources=(), expr=Concat(tuple(parts)), segments=tuple(sizes))


def merged_name(names: Sequence[str]) -> str:
    """One name of several: what they have in common, once. "attn.q_proj.weight" and "attn.k_proj.weight" are
    "attn.q_k_proj.weight"."""
    words = [re.split(r"(?<=[._])", name) for name in names]
    start = _shared(words)
    ends = [w[start:][::-1] for w in words]
    end = _shared(ends)
    middle = "_".join("".join(e[end:][::-1]).rstrip("._") for e in ends)
    return "".join(words[0][:start]) + middle + _separator(ends[0], end) + "".join(ends[0][:end][::-1])


def _shared(words: Sequence[Sequence[str]]) -> int:
    """How many words all begin with."""
    columns = zip(*words, strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, words)))


def _separator(reversed_words: Sequence[str], end: int) -> str:
    """What stands between the words that differ and the shared last ones."""
    last = reversed_words[end] if end < len(reversed_words) else ""
    return last[-1] if last.endswith((".", "_")) else ""
