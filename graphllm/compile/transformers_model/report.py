"""What of a model of transformers stayed ordinary ops, and what share of a step they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from graphllm.compile.transformers_model import leaf_ops
from graphllm.ir.op import nbytes, op_of
from graphllm.program.manifest import OrdinaryOps

if TYPE_CHECKING:
    from graphllm.compile.transformers_model.adoption import Adopted


_MUCH = 0.01  # of a step's bytes


def ordinary_ops(model: Adopted) -> tuple[OrdinaryOps, ...]:
    """The notes of all recipes and what reads or writes much without one, alike calls as one, the largest first."""
    runs = Counter(model.layer_types)
    units = [("embed", model.embed, 1), *((n, r, runs[n]) for n, r in model.layers.items()), ("head", model.head, 1)]
    whole = sum(times * sum(map(_bytes, recipe.graph.nodes)) for _, recipe, times in units)
    found: dict[tuple[str, str, str], tuple[int, float]] = {}
    for unit, recipe, times in units:
        nodes = {node.name: node for node in recipe.graph.nodes}
        noted = dict(recipe.notes)
        for node in nodes.values():
            if node.name not in noted and op_of(node.target) is None and times * _bytes(node) >= _MUCH * whole:
                noted[node.name] = "no op does the same"
        for what, why in noted.items():
            node = nodes.get(what)
            key = (unit, what if node is None else _said(node), why)
            count, share = found.get(key, (0, 0.0))
            own = float("nan") if node is None else times * _bytes(node) / whole
            found[key] = (count + times, share + own)
    rows = [OrdinaryOps(*key, times, None if share != share else share) for key, (times, share) in found.items()]
    return tuple(sorted(rows, key=lambda row: -(row.share or 0.0)))


def _said(node: Node) -> str:
    """aten.bmm, and not aten.bmm.default."""
    return str(getattr(node.target, "overloadpacket", node.target))


def _bytes(node: Node) -> int:
    """What a call reads and writes in a step of one token, by the op's own formula where there is one. Views are none,
    and attention is left out: what it reads is known by the lengths only."""
    if node.op != "call_function" or node.target is leaf_ops.attention or _is_view(node):
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs, made = tree_map(_of_one_token, (args, kwargs, node.meta["val"]))
    op = op_of(node.target)
    if op is not None:
        return 0 if op.boundary else op.cost(**op.bind(args, kwargs)).bytes
    return nbytes(*_tensors((args, kwargs, made)))


def _of_one_token(value: Any) -> Any:
    """A fake value with one for every symbol in its sizes."""
    if isinstance(value, Tensor):
        return torch.empty([_number(d) for d in value.shape], dtype=value.dtype, device="meta")
    return _number(value) if isinstance(value, torch.SymInt) else value


def _number(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr.subs(dict.fromkeys(expr.free_symbols, 1)))


def _tensors(values: Any) -> Iterable[Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, Tensor)]


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
