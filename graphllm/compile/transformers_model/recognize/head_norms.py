"""Head norms: norms that have a module of their own for each head become one, with a weight for each head."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from graphllm.compile.transformers_model.recognize.draft import Draft, args_of, argument, aten, extents, value
from graphllm.compile.transformers_model.recognize.linears import expression
from graphllm.ir import Weight
from graphllm.weights.plan.expr import Concat, Reshape

_EPS = 1e-5  # of aten.layer_norm


def join_head_norms(draft: Draft) -> None:
    """Put one aten.layer_norm and a product in the places of parts that are normalized one by one."""
    for node in draft.calls(aten.cat.default):
        _join(draft, node, args_of(node)[0])
    draft.drop_unread()


def _join(draft: Draft, node: Node, norms: Any) -> None:
    dim = argument(node, 1, "dim", 0)
    if (
        len(norms) < 2
        or value(node).dim() != 3
        or dim > 1
        or any(n.target is not aten.layer_norm.default for n in norms)
    ):
        return
    weights = [draft.weight_of(argument(n, 2, "weight")) for n in norms]
    eps = {argument(n, 4, "eps", _EPS) for n in norms}
    rows = [args_of(n)[0] for n in norms]
    whole = [r.target is aten.slice.Tensor and args_of(r)[1:] == (dim, i, i + 1) for i, r in enumerate(rows)]
    if not all(whole) or any(args_of(r)[0] is not rows[0].args[0] for r in rows) or len(eps) != 1:
        return
    x = rows[0].args[0]
    if any(argument(n, 3, "bias") is not None for n in norms) or any(w is None or not w.sources for w in weights):
        draft.note(node.name, "norms of each head with a bias")
        return
    count, width = len(norms), int(extents(x)[-1])
    if extents(x)[dim] != count:
        return
    reads = tuple(expression(w) for w in weights if w is not None)
    names = [draft.name_of(argument(n, 2, "weight")) for n in norms]
    made = Weight((count, width), expr=Reshape(Concat(reads), (count, width)))
    scale = draft.insert(node, aten.unsqueeze.default, draft.weight(f"{names[0]}_to_{count - 1}", made), 1 - dim)
    normed = draft.insert(node, aten.layer_norm.default, x, [width], None, None, eps.pop())
    draft.replace(node, draft.insert(node, aten.mul.Tensor, normed, scale))
