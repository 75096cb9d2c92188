"""Routing: the ordinary ops that choose experts, as `moe_route` where they compute the same.

What they compute is found out by computing it: the part of the graph between the router's logits and `fused_moe` is run
on random logits, and compared with `moe_route` for each scoring, number of groups and so on that may be meant.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from graphllm.compile.transformers_model.experts.numbers import real_numbers
from graphllm.compile.transformers_model.recipe import MODEL_DTYPE, Recipe
from graphllm.compile.transformers_model.recognize.draft import Draft, name_of
from graphllm.ir import Weight
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.ops.moe.moe_route.op import Routing
from graphllm.weights.plan.expr import Read, Reshape

aten = torch.ops.aten
# Relative: a router in 16 bits rounds by more, and sums that are divided by may have some 1e-6 added.
_TOLERANCE = 1e-4
_SPREADS, _OFFSETS, _ROWS = (0.02, 0.3, 2.0, 6.0), (-4.0, 0.0, 4.0), 12


class _Part(NamedTuple):
    """What is between logits and `fused_moe`.

    logits: [T, N].
    nodes: in the order of the graph, without the logits and the bias.
    bias: the parameter of N numbers that is read, if there is one.
    weights, experts: the results, [T, A].
    """

    logits: Node
    nodes: list[Node]
    bias: Node | None
    weights: Node
    experts: Node


def with_routing(recipe: Recipe) -> Recipe:
    """The recipe with `moe_route` in the places of ordinary ops that do the same. What stays ordinary is noted. Routers
    are exact: quantization leaves them."""
    if not recipe.graph.find_nodes(op="call_function", target=fused_moe.overload):
        return recipe
    draft = Draft(recipe)
    for node in draft.graph.find_nodes(op="call_function", target=aten.type_as.default):  # it reads no numbers
        draft.replace(node, draft.insert(node, aten.to.dtype, node.args[0], node.meta["val"].dtype))
    for call in draft.graph.find_nodes(op="call_function", target=fused_moe.overload):
        _route(draft, call)
    return draft.recipe()


def _route(draft: Draft, call: Node) -> None:
    given = fused_moe.bind(call.args, call.kwargs)
    weights, experts, N = (
        given["weights_TA"],
        given["experts_TA"],
        draft.weights[name_of(given["gate_up_N2FD"])].shape[0],
    )
    for end in _ends(weights):
        for part in _parts(end, experts, N):
            _keep_exact(draft, part.logits)
            if (routing := _meant(part, N, weights.meta["val"].shape[1])) is not None:
                _emit(draft, part, routing)
                return
    draft.note("routing", "it is none of what the op moe_route does, and stays ordinary ops")


def _ends(weights: Node) -> Iterator[Node]:
    """The weights of experts, and what they are made of that may be weights, too: a model may go on with them."""
    shape = list(map(str, weights.meta["val"].shape))
    for node in _ancestors([weights], None)[::-1]:
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.is_floating_point() and list(map(str, value.shape)) == shape:
            yield node


def _emit(draft: Draft, part: _Part, routing: Routing) -> None:
    kwargs = {n: v for n, v in routing._asdict().items() if n not in ("bias_N", "shared", "share_T1")}
    if routing.bias_N is not None:
        bias = _zeros(draft, len(routing.bias_N)) if part.bias is None else _as_bias(draft, part.bias)
        kwargs["bias_N"] = bias
    chosen = part.experts.args[0] if part.experts.target is aten.to.dtype else part.experts
    assert isinstance(chosen, Node)
    before = part.logits.next
    made = draft.insert(before, moe_route.overload, logits_TN=part.logits, **kwargs)
    weights, experts = (draft.insert(before, operator.getitem, made, i) for i in range(2))
    draft.replace(part.experts, experts)
    if any(user is not part.experts and user not in part.nodes for user in chosen.users):
        draft.replace(chosen, draft.cast(before, experts, chosen.meta["val"].dtype))
    draft.replace(part.weights, draft.cast(before, weights, part.weights.meta["val"].dtype))


def _as_bias(draft: Draft, node: Node) -> Node:
    """The parameter as [N] float32."""
    weight = draft.weights[name_of(node)]
    if len(weight.shape) > 1:
        (source,) = weight.sources
        N = max(weight.shape)
        read = Read((source,) if isinstance(source, str) else source, weight.shape)
        weight = replace(weight, shape=(N,), sources=(), expr=Reshape(read, (N,)))
    return draft.become(node, replace(weight, dtype="float32", exact=True))


def _zeros(draft: Draft, N: int) -> Node:
    return draft.weight("no_correction", Weight((N,), value=(0.0,) * N, dtype="float32", exact=True))


def _parts(weights: Node, experts: Node, N: int) -> Iterator[_Part]:
    """What may be a routing, from each value of N numbers a token on, the router's product first."""
    above = _ancestors([weights, experts], None)
    T = str(weights.meta["val"].shape[0])

    def is_logits(node: Node) -> bool:
        value = node.meta["val"]
        if not isinstance(value, Tensor) or not value.is_floating_point() or node.op != "call_function":
            return False
        return [str(d) for d in value.shape] == [T, str(N)]

    products = [
        i for i, n in enumerate(above) if is_logits(n) and n.target in (aten.linear.default, aten.addmm.default)
    ]
    for logits in filter(is_logits, above[products[-1] :] if products else ()):
        nodes = _ancestors([weights, experts], logits)
        given = [n for n in nodes if n.op == "placeholder"]
        if logits in nodes and len(given) <= 1 and all(name_of(n) and n.meta["val"].numel() == N for n in given):
            yield _Part(
                logits,
                [n for n in nodes if n is not logits and n not in given],
                next(iter(given), None),
                weights,
                experts,
            )


def _ancestors(results: list[Node], stop: Node | None) -> list[Node]:
    """The nodes that make some results, and these, in the order of the graph. stop: its own ancestors are left out."""
    found: set[Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if node is not stop and not isinstance(node.meta["val"], int | torch.SymInt):
            todo += node.all_input_nodes
    return [n for n in results[0].graph.nodes if n in found]


def _keep_exact(draft: Draft, logits: Node) -> None:
    """Mark the router's parameters. One that is cast to float32 for the product is kept in that."""
    if logits.target not in (aten.linear.default, aten.addmm.default):
        return
    for node in logits.all_input_nodes:
        is_cast = node.target is aten.to.dtype and node.meta["val"].dtype == torch.float32
        parameter: Any = node.args[0] if is_cast else node
        if not (name := name_of(parameter)):
            continue
        draft.weights[name] = replace(draft.weights[name], exact=True)
        if is_cast and len(parameter.users) == 1:
            draft.replace(node, draft.become(parameter, replace(draft.weights[name], dtype="float32")))


def _meant(part: _Part, N: int, k: int) -> Routing | None:
    """The arguments of `moe_route` that make of all logits what a part of a graph makes of them."""
    with real_numbers(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)

        def rows(spread: float, offset: float) -> Tensor:
            return torch.randn(_ROWS, N, generator=generator) * spread + offset

        logits = torch.cat([rows(spread, offset) for spread in _SPREADS for offset in _OFFSETS])
        bias = torch.randn(N, generator=generator) * 0.3
        try:
            weights, experts = _computed(part, logits, bias)
        except (RuntimeError, TypeError, NotImplementedError):  # ops that need more than these values
            return None
        wanted = _spread(weights, experts, N)
        for routing in _candidates(part, bias, k, N):
            own_weights, own_experts = moe_route.reference(logits, routing)
            own = _spread(own_weights, own_experts, N)
            scale = float(wanted.sum() / own.sum())
            if scale > 0 and torch.allclose(own * scale, wanted, rtol=_TOLERANCE, atol=1e-7 * scale):
                return routing._replace(scale=_written(part, scale))
    return None


def _candidates(part: _Part, bias: Tensor, k: int, N: int) -> Iterator[Routing]:
    """What a part may be. Numbers of groups, and of a jitter, are among its arguments."""
    values = [v for n in part.nodes for v in tree_leaves((n.args, n.kwargs))]
    whole = sorted({v for v in values if type(v) is int and 1 < v <= N})
    groups = [(1, 1), *((g, kept) for g in whole if N % g == 0 and g < N for kept in {1, *whole} if kept < g)]
    biases = [bias] if part.bias is not None else [None, torch.zeros(N)]
    for own, (number, kept), scoring, renormalize in itertools.product(
        biases, groups, ("softmax", "sigmoid"), (True, False)
    ):
        if kept * (N // number) >= k and not (number == 1 and own is not None and part.bias is None):
            yield Routing(k, scoring, renormalize, 1.0, number, kept, own)
    if part.bias is None:
        for jitter in sorted({v / 2 for v in values if type(v) is float and 0 < v < 1}):
            yield Routing(k, "sparsemixer", jitter=jitter)


def _computed(part: _Part, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The part's results of some logits, in float32."""
    env: dict[Node, Any] = {part.logits: logits}
    if part.bias is not None:
        env[part.bias] = bias.view(tuple(part.bias.meta["val"].shape))
    T = part.logits.meta["val"].shape[0]
    for node in part.nodes:
        value = node.meta["val"]
        if isinstance(value, int | torch.SymInt):
            env[node] = _size(value, T, len(logits))
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = tree_map(lambda v: _known(v, T, len(logits)), (args, kwargs))
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return env[part.weights], env[part.experts]


def _known(value: Any, T: Any, rows: int) -> Any:
    """An argument for numbers in float32 of so many rows."""
    if isinstance(value, torch.SymInt):
        return _size(value, T, rows)
    return torch.float32 if value is MODEL_DTYPE else value


def _size(value: Any, T: Any, rows: int) -> int:
    return int(value.node.expr.subs({T.node.expr: rows})) if isinstance(value, torch.SymInt) else int(value)


def _spread(weights: Tensor, experts: Tensor, N: int) -> Tensor:
    """The weight of each expert, [rows, N]: the order of the chosen ones does not matter."""
    return torch.zeros(len(weights), N).scatter(1, experts.long(), weights.float())


def _written(part: _Part, scale: float) -> float:
    """A factor as it stands in the graph; one that does not stand there is rounded."""
    values = [v for n in part.nodes for v in tree_leaves((n.args, n.kwargs)) if isinstance(v, int | float) and v]
    found = (v for v in (1.0, *values, *(1 / v for v in values)) if abs(v - scale) <= _TOLERANCE * scale)
    return float(next(found, float(f"{scale:.5g}")))
