"""Norms: rms_norm and layer_norm, found by what they compute, in any order of casts and products.

A mean of squares over the last dimension, its inverse root times the row, and what follows in a chain: casts, the
product with a weight, or with 1 + a weight, and of a layer norm a bias. Where a model multiplies in float32 before it
rounds, ours rounds once more, as kernels that join more of a layer do not; weights of the form 1 + w stay float32, so
that these products are exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphllm.compile.transformers_model.recognize.draft import (
    Draft,
    args_of,
    argument,
    aten,
    is_tensor,
    last,
    value,
)  # fmt: skip
from graphllm.ir import Weight
from graphllm.ops.norms.layer_norm import layer_norm
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.rewrite import only_user
from graphllm.weights.plan.expr import Each, Expr, Read, Repeat, Values

_EPS = 1e-5  # of aten.layer_norm


class _Chain(NamedTuple):
    """What follows the normalized row. end: the last node of it. weight: the factor, if there is one, and whether it is
    1 + that. bias: what a layer norm adds."""

    end: Node
    weight: Node | None = None
    plus_one: bool = False
    bias: Node | None = None


def find_norms(draft: Draft) -> None:
    """Put our norms in the places of what computes them."""
    for root in draft.calls(aten.rsqrt.default, aten.pow.Tensor_Scalar, aten.reciprocal.default, aten.sqrt.default):
        if root.users:
            _composed(draft, root)
    draft.drop_unread()
    for node in draft.calls(aten.layer_norm.default):
        _layer_norm(draft, node)
    for node in draft.calls(aten.rms_norm.default):
        _rms_norm(draft, node)
    draft.drop_unread()


def _composed(draft: Draft, root: Node) -> None:
    """A norm that is written out. root: the (inverse) root of the mean square."""
    found = _mean_square(root)
    if found is None:
        return
    row, eps = found
    normed = next((u for u in root.users if _scales(u, row, root)), None)
    if normed is None:
        return
    x, centered = _uncentered(row), False
    if x is not None:
        centered = True
    else:
        x = row
    source = _narrow(x)
    chain = _chain(draft, normed, centered, value(source).dtype)
    _write(draft, source, chain, eps, centered)


def _mean_square(root: Node) -> tuple[Node, float] | None:
    """The row and eps of 1 / sqrt(mean(row^2) + eps), or of sqrt(mean(row^2) + eps)."""
    if root.target is aten.pow.Tensor_Scalar and args_of(root)[1] not in (-0.5, 0.5):
        return None
    if root.target is aten.reciprocal.default:
        inner: Any = args_of(root)[0]
        return _mean_square(inner) if inner.op == "call_function" and inner.target is aten.sqrt.default else None
    mean, eps = _sum_of(args_of(root)[0])
    if mean is None or mean.target is not aten.mean.dim or not argument(mean, 2, "keepdim", False):
        return None
    square: Any = args_of(mean)[0]
    dims = argument(mean, 1, "dim")
    if len(dims) != 1 or not last(square, dims[0]) or square.op != "call_function":
        return None
    if square.target is aten.pow.Tensor_Scalar and args_of(square)[1] == 2:
        return args_of(square)[0], eps
    if square.target is aten.square.default:
        return args_of(square)[0], eps
    if square.target is aten.mul.Tensor and args_of(square)[0] is args_of(square)[1]:
        return args_of(square)[0], eps
    return None


def _sum_of(node: Any) -> tuple[Node | None, float]:
    """A value and the number that is added to it."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None, 0.0
    if node.target in (aten.add.Tensor, aten.add.Scalar):
        for x, number in (args_of(node)[:2], args_of(node)[1::-1]):
            if isinstance(x, Node) and x.op == "call_function" and isinstance(number, (int, float)):
                return x, float(number)
        return None, 0.0
    return node, 0.0


def _scales(node: Node, row: Node, root: Node) -> bool:
    """Whether a node is the row at unit size."""
    if root.target is aten.sqrt.default or (root.target is aten.pow.Tensor_Scalar and args_of(root)[1] == 0.5):
        return node.target is aten.div.Tensor and args_of(node) == (row, root)
    return node.target is aten.mul.Tensor and set(args_of(node)) == {row, root}


def _uncentered(row: Node) -> Node | None:
    """x of x - mean(x)."""
    if row.op != "call_function" or row.target is not aten.sub.Tensor or len(args_of(row)) != 2 or row.kwargs:
        return None
    x, mean = args_of(row)
    if not isinstance(mean, Node) or mean.op != "call_function" or mean.target is not aten.mean.dim:
        return None
    dims = argument(mean, 1, "dim")
    same = args_of(mean)[0] is x and argument(mean, 2, "keepdim", False) and len(dims) == 1 and last(x, dims[0])
    return x if same else None


def _narrow(row: Node) -> Node:
    """The row before it became float32."""
    if row.op == "call_function" and row.target is aten.to.dtype and value(row).dtype == torch.float32:
        return args_of(row)[0]
    return row


def _chain(draft: Draft, normed: Node, centered: bool, dtype: torch.dtype) -> _Chain:
    """The longest chain after a normalized row that ends in the row's dtype."""
    chain = found = _Chain(normed)
    while (user := only_user(chain.end)) is not None and user.op == "call_function":
        if user.target is aten.to.dtype:
            chain = chain._replace(end=user)
        elif user.target is aten.mul.Tensor and chain.weight is None and chain.bias is None:
            factor = _of_weight(draft, _other(user, chain.end), value(normed).shape[-1])
            if factor is None:
                break
            chain = _Chain(user, *factor)
        elif user.target is aten.add.Tensor and centered and chain.bias is None and chain.weight is not None:
            term = _of_weight(draft, _other(user, chain.end), value(normed).shape[-1])
            if term is None or term[1]:
                break
            chain = chain._replace(end=user, bias=term[0])
        else:
            break
        if value(chain.end).dtype == dtype:
            found = chain
    return found


def _other(node: Node, operand: Node) -> Any:
    return args_of(node)[1] if args_of(node)[0] is operand else args_of(node)[0]


def _of_weight(draft: Draft, node: Any, width: int | torch.SymInt) -> tuple[Node, bool] | None:
    """The parameter [width] that a factor is, and whether it is 1 + that."""
    plus_one = False
    while isinstance(node, Node) and node.op == "call_function":
        if node.target is aten.to.dtype:
            node = args_of(node)[0]
        elif node.target in (aten.add.Tensor, aten.add.Scalar) and not plus_one:
            plain, one = _sum_of_parameter(node)
            if plain is None or one != 1:
                return None
            node, plus_one = plain, True
        else:
            return None
    if draft.weight_of(node) is None or tuple(value(node).shape) != (width,):
        return None
    return node, plus_one


def _sum_of_parameter(node: Node) -> tuple[Node | None, float]:
    for x, number in (args_of(node)[:2], args_of(node)[1::-1]):
        if isinstance(x, Node) and isinstance(number, (int, float)):
            return x, float(number)
    return None, 0.0


def _write(draft: Draft, source: Node, chain: _Chain, eps: float, centered: bool) -> None:
    """Our op, and a cast where the chain ends in another dtype."""
    at = chain.end
    width = value(source).shape[-1]
    if not isinstance(width, int):
        return
    weight = _ones(draft, width) if chain.weight is None else chain.weight
    if chain.weight is not None and chain.plus_one:
        weight = _one_more(draft, chain.weight, wide=not centered)
    if centered:
        made = draft.insert(at, layer_norm, x=source, weight=weight, bias=chain.bias, eps=eps)
    else:
        made = draft.insert(at, rms_norm, x=source, weight=weight, eps=eps)
    if value(made).dtype != value(at).dtype:
        made = draft.insert(at, aten.to.dtype, made, value(at).dtype)
    draft.replace(at, made)


def _ones(draft: Draft, width: int) -> Node:
    """The weight of a norm without one."""
    return draft.weight(f"ones_{width}", Weight((width,), expr=Repeat(Values((1.0,), (1,)), 0, width)))


def _one_more(draft: Draft, weight: Node, wide: bool) -> Node:
    """1 + a weight, computed when it is loaded. wide: kept in float32, as the model computes it."""
    stored = draft.weights[draft.name_of(weight)]
    expr = stored.expr if isinstance(stored.expr, Expr) else _read(stored)
    made = replace(stored, sources=(), expr=Each("+1", expr), dtype="float32" if wide else "model")
    return draft.weight(f"{draft.name_of(weight)}_plus_one", made)


def _read(stored: Weight) -> Read:
    (source,) = stored.sources
    return Read((source,) if isinstance(source, str) else source, stored.shape)


def _layer_norm(draft: Draft, node: Node) -> None:
    """aten.layer_norm over the last dimension; weights may be missing, or 1 + a parameter."""
    x, shape = args_of(node)[:2]
    weight, bias, eps = argument(node, 2, "weight"), argument(node, 3, "bias"), argument(node, 4, "eps", _EPS)
    if not is_tensor(x) or len(shape) != 1:
        return
    width = value(x).shape[-1]
    if weight is not None and draft.weight_of(weight) is None:
        found = _of_weight(draft, weight, width)
        weight = _one_more(draft, found[0], wide=False) if found is not None and found[1] else weight
    if weight is None:
        weight = _ones(draft, int(width))
    row, end = _around(x, node)
    draft.replace(end, draft.insert(end, layer_norm, x=row, weight=weight, bias=bias, eps=float(eps)))


def _around(x: Node, node: Node) -> tuple[Node, Node]:
    """The row and the end of a norm that is computed in float32 and rounded at once: without these casts."""
    row, user = _narrow(x), only_user(node)
    if row is not x and user is not None and user.target is aten.to.dtype and value(user).dtype == value(row).dtype:
        return row, user
    return x, node


def _rms_norm(draft: Draft, node: Node) -> None:
    x, shape = args_of(node)[:2]
    weight, eps = argument(node, 2, "weight"), argument(node, 3, "eps")
    if not is_tensor(x) or len(shape) != 1 or eps is None:
        draft.note(node.name, "a norm over several dimensions, or with the dtype's own eps")
        return
    if weight is None:
        weight = _ones(draft, int(value(x).shape[-1]))
    row, end = _around(x, node)
    draft.replace(end, draft.insert(end, rms_norm, x=row, weight=weight, eps=float(eps)))
