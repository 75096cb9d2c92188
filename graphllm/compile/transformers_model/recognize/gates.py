"""Gates: act(gate) * up becomes `swiglu` or `geglu` where gate and up are the halves of one value.

Other activations stay ordinary: the compiler joins them to one kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from graphllm.compile.transformers_model.recognize.draft import (
    Draft,
    args_of,
    aten,
    is_tensor,
    own_op,
    value,
)
from graphllm.compile.transformers_model.recognize.linears import expression, gate_of
from graphllm.ops.activations.geglu import geglu
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.gemm.linear import linear
from graphllm.rewrite import only_user
from graphllm.weights.plan.expr import Concat, Slice


def find_gates(draft: Draft) -> None:
    """Put gated activations in the places of their products."""
    for node in draft.calls(aten.mul.Tensor):
        _silu(draft, node)
    for node in draft.calls(aten.mul.Tensor):
        if len(args_of(node)) == 2 and all(is_tensor(a) for a in args_of(node)):
            for gate, up in (args_of(node), args_of(node)[::-1]):
                if _gated(draft, node, gate, up):
                    break
    draft.drop_unread()


def _silu(draft: Draft, node: Node) -> None:
    """x * sigmoid(x) as one activation."""
    for x, factor in (args_of(node)[:2], args_of(node)[1::-1]):
        if isinstance(factor, Node) and factor.target is aten.sigmoid.default and args_of(factor)[0] is x:
            draft.replace(node, draft.insert(node, aten.silu.default, x))
            return


def _gated(draft: Draft, node: Node, gate: Any, up: Any) -> bool:
    under = gate_of(gate)
    halves = None if under is None else _halves(draft, under, up)
    if under is None or halves is None:
        return False
    if args_of(gate)[0] is not under or only_user(gate) is not node:
        draft.note(node.name, "no gated op has several activations: the compiler joins them")
        return False
    if gate.target is aten.silu.default:
        draft.replace(node, draft.insert(node, swiglu, gate_up_T2F=halves))
        return True
    if gate.target is aten.gelu.default:
        draft.replace(node, draft.insert(node, geglu, gate_up_T2F=halves, approximate=_approximation(gate)))
        return True
    draft.note(node.name, f"no gated op has {gate.target}: the compiler joins it")
    return False


def _approximation(gate: Node) -> str:
    return str(gate.kwargs.get("approximate", "none"))


def _halves(draft: Draft, gate: Node, up: Any) -> Node | None:
    """The rows [T, 2F] that have the gate first and then what it is multiplied with."""
    parts = []
    for part in (gate, up):
        if not isinstance(part, Node) or part.target is not aten.slice.Tensor or len(args_of(part)) != 4:
            return None
        parts.append(args_of(part))
    (x, dim, *gate_at), (other, other_dim, *up_at) = parts
    if x is not other or value(x).dim() != 2 or own_op(x) is None or (dim, other_dim) != (1, 1):
        return None
    width = int(value(x).shape[1])
    first, second = [0, width // 2], [width // 2, width]
    if width % 2 == 0 and (gate_at, up_at) == (first, second):
        return x
    return _exchanged(draft, x) if width % 2 == 0 and (up_at, gate_at) == (first, second) else None


def _exchanged(draft: Draft, call: Node) -> Node | None:
    """A product with the halves of its matrix, and of its bias, in the other order; None for one that others read."""
    if own_op(call) is not linear or len(call.users) != 2:
        return None
    given = linear.bind(call.args, call.kwargs)
    changed = {}
    for name in ("weight_OI", "bias_O"):
        weight = draft.weight_of(given[name])
        if given[name] is None:
            continue
        if weight is None or len(given[name].users) != 1 or len(weight.sources) != 1 or weight.transpose:
            return None
        half = weight.shape[0] // 2
        stored = expression(weight)
        expr = Concat((Slice(stored, 0, half, 2 * half), Slice(stored, 0, 0, half)))
        made = replace(weight, sources=(), expr=expr, segments=(half, half))
        changed[name] = draft.weight(f"{draft.name_of(given[name])}_exchanged", made)
    return draft.insert(call, linear, x_TI=given["x_TI"], **changed)
