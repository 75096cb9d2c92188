"""A recipe as one tensor-parallel rank has it: weights of its share, and sizes of heads and widths that follow them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from graphllm.compile.transformers_model import leaf_ops
from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.compile.transformers_model.unbatched import Builder, args_of
from graphllm.config import ConfigError
from graphllm.ir import Weight
from graphllm.ir.graph import Shapes
from graphllm.ir.op import op_of
from graphllm.ops.activations.geglu import geglu
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.attention.rope import rope
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.weights.plan.expr import Read
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.shard import shard_plan

aten = torch.ops.aten


class Share(NamedTuple):
    """What a rank has of a dimension of a value: of each piece, one after the other, ``own`` of ``whole`` entries."""

    dim: int
    whole: tuple[int, ...]
    own: tuple[int, ...]


def local(recipe: Recipe, shapes: Shapes, degree: int, experts_apart: bool) -> Recipe:
    """The recipe of one of ``degree`` ranks. shapes: the symbols of the recipe's graph. experts_apart: experts are
    divided by number, which the pass `shard` sees to. Raises ConfigError for what cannot be divided evenly."""
    weights, shares = dict[str, Weight](), dict[str, Share]()
    for name, weight in recipe.weights.items():
        apart = weight.shard in ("vocab", "expert") or (experts_apart and weight.expert_axis is not None)
        weights[name], share = (weight, None) if apart or weight.tie else _divided(name, weight, degree)
        if share is not None:
            shares[name] = share
    graph = _Local(recipe.graph, shapes, degree, weights, shares).run() if shares else recipe.graph
    return Recipe(graph, weights, recipe.notes)


def _divided(name: str, weight: Weight, degree: int) -> tuple[Weight, Share | None]:
    """A weight of the rank's shape, and its share."""
    whole = Read((name,), weight.shape)
    entry = Entry(
        name, weight.shape, "float32", whole, weight.shard, weight.segments, weight.expert_axis, heads=weight.heads
    )
    (made,) = shard_plan(WeightPlan((entry,)), degree)
    if made.division is None:
        return weight, None
    pieces = made.division.pieces
    share = Share(made.division.dim, tuple(p.length for p in pieces), tuple(p.each for p in pieces))
    return replace(weight, shape=made.shape, segments=made.segments), share


class _Local:
    def __init__(
        self, graph: Graph, shapes: Shapes, degree: int, weights: dict[str, Weight], shares: dict[str, Share]
    ) -> None:
        self._old, self._built, self._degree = graph, Builder(shapes), degree
        self._weights, self._of_weights = weights, shares
        self._env: dict[Node, Node] = {}
        self._shares: dict[Node, Share] = {}

    def run(self) -> Graph:
        for node in self._old.nodes:
            if node.op == "placeholder":
                self._env[node] = self._input(node)
            elif node.op == "output":
                self._built.graph.output(torch.fx.map_arg(args_of(node)[0], self._env.__getitem__)).meta["val"] = None
            else:
                self._call(node)
        return self._built.graph

    def _input(self, node: Node) -> Node:
        value, label = node.meta["val"], str(node.target)
        name = label.removeprefix("w.")
        if label.startswith("w.") and name in self._of_weights:
            with self._built.shapes.mode:
                value = value.new_empty(self._weights[name].shape)
            self._shares[node] = self._of_weights[name]
        return self._built.input(label, value)

    def _call(self, node: Node) -> None:
        args, kwargs, share = self._changed(node)
        args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: self._env[n])
        try:
            made = self._built.call(node.target, *args, **kwargs)
        except (RuntimeError, ValueError) as problem:
            raise self._refused(node, str(problem).split("\n")[0]) from problem
        self._env[node] = made
        if share is not None:
            self._shares[node] = share

    def _changed(self, node: Node) -> tuple[Any, Any, Share | None]:
        """The call's arguments with the rank's sizes, and the share that its result is."""
        divided = [n for n in node.all_input_nodes if n in self._shares]
        own = op_of(node.target)
        if not divided:
            return args_of(node), node.kwargs, None
        if own is linear:
            return args_of(node), node.kwargs, self._of_linear(node)
        if own is not None and own not in (rope, rms_norm, layer_norm, swiglu, geglu):
            return args_of(node), node.kwargs, None  # experts, whose weights are divided: results are parts of a sum
        first = self._shares.get(divided[0])
        assert first is not None
        if own in (swiglu, geglu):
            half = len(first.whole) // 2
            return args_of(node), node.kwargs, Share(first.dim, first.whole[:half], first.own[:half])
        if own is not None or node.target is leaf_ops.attention:
            return args_of(node), node.kwargs, self._shares.get(_first(node))
        if node.target in (aten.reshape.default, aten.view.default):
            return self._reshaped(node, first)
        if node.target is aten.split_with_sizes.default:
            return self._split(node, first)
        if node.target is operator.getitem:
            return args_of(node), node.kwargs, _piece(first, self._old_split(node), args_of(node)[1])
        if node.target is aten.slice.Tensor:
            return self._sliced(node, first)
        return args_of(node), node.kwargs, self._aligned(node, divided)

    def _of_linear(self, node: Node) -> Share | None:
        weight = linear.bind(args_of(node), node.kwargs)["weight_OI"]
        share = self._shares.get(weight)
        return None if share is None or share.dim else Share(1, share.whole, share.own)

    def _reshaped(self, node: Node, share: Share) -> tuple[Any, Any, Share]:
        """The same entries by other dimensions: pieces are whole numbers of what follows the divided one."""
        x, sizes = args_of(node)[:2]
        old, new = x.meta["val"].shape, node.meta["val"].shape
        before, after = math.prod(old[share.dim + 1 :]), math.prod(new[share.dim + 1 :])
        whole, own = ([n * before for n in pieces] for pieces in (share.whole, share.own))
        if str(old[: share.dim]) != str(new[: share.dim]) or any(n % after for n in (*whole, *own)):
            raise self._refused(node, f"{list(old)} becomes {list(new)}")
        found = Share(share.dim, tuple(n // after for n in whole), tuple(n // after for n in own))
        changed = [sum(found.own) if i == share.dim else n for i, n in enumerate(sizes)]
        return (x, changed), node.kwargs, found

    def _split(self, node: Node, share: Share) -> tuple[Any, Any, Share]:
        x, sizes, dim = (*args_of(node), 0)[:3]
        if dim % x.meta["val"].dim() != share.dim:
            return args_of(node), node.kwargs, share
        parts = _grouped(share, sizes)
        if parts is None:
            raise self._refused(node, f"{sizes} are no pieces of {share.whole}")
        return (x, [sum(p.own) for p in parts], dim), node.kwargs, share

    def _old_split(self, node: Node) -> tuple[Sequence[int], int] | None:
        of = args_of(node)[0]
        if not isinstance(of, Node) or of.target is not aten.split_with_sizes.default:
            return None
        x, sizes, dim = (*args_of(of), 0)[:3]
        return sizes, dim % x.meta["val"].dim()

    def _sliced(self, node: Node, share: Share) -> tuple[Any, Any, Share]:
        x, dim, start, stop = (*args_of(node), 0, None, None)[:4]
        if dim % x.meta["val"].dim() != share.dim:
            return args_of(node), node.kwargs, share
        total = sum(share.whole)
        first, last = start or 0, min(total if stop is None else stop, total)
        parts = _grouped(share, [n for n in (first, last - first, total - last) if n])
        if parts is None or len(args_of(node)) > 4:
            raise self._refused(node, f"{first} to {last} are no pieces of {share.whole}")
        part = parts[1 if first else 0]
        begin = sum(parts[0].own) if first else 0
        return (x, dim, begin, begin + sum(part.own)), node.kwargs, part

    def _aligned(self, node: Node, divided: list[Node]) -> Share:
        """Of calls that leave the divided dimension as it is: entry by entry, and those that put dimensions around."""
        shares, rank = [self._shares[n] for n in divided], node.meta["val"].dim()
        largest = max(divided, key=lambda n: n.meta["val"].dim())
        share = self._shares[largest]
        behind = largest.meta["val"].dim() - share.dim
        extents = {sum(s.whole) for s in shares}
        if len(extents) != 1 or share.dim >= rank:
            raise self._refused(node, f"shares of {sorted(extents)}")
        if node.target in (aten.unsqueeze.default, aten.stack.default):
            dim = (args_of(node)[1] if len(args_of(node)) > 1 else 0) % rank
            return share._replace(dim=share.dim + (dim <= share.dim))
        if node.target is aten.select.int:
            dim = args_of(node)[1] % largest.meta["val"].dim()
            if dim == share.dim:
                raise self._refused(node, "one of all heads is taken")
            return share._replace(dim=share.dim - (dim < share.dim))
        if node.target is aten.cat.default:
            dim = (args_of(node)[1] if len(args_of(node)) > 1 else 0) % rank
            if dim != share.dim:
                return share
            if len(shares) != len(args_of(node)[0]):
                raise self._refused(node, "shares and whole values are concatenated")
            return Share(
                dim,
                tuple(itertools.chain(*(s.whole for s in shares))),
                tuple(itertools.chain(*(s.own for s in shares))),
            )
        return share._replace(dim=rank - behind)

    def _refused(self, node: Node, why: str) -> ConfigError:
        return ConfigError(
            f"tensor_parallel_size is {self._degree}: the model cannot be divided at {node.target}: {why}; use 1"
        )


def _first(node: Node) -> Node:
    return node.all_input_nodes[0] if args_of(node) == () else args_of(node)[0]


def _piece(share: Share, split: tuple[Sequence[int], int] | None, index: Any) -> Share:
    if split is None or split[1] != share.dim:
        return share
    parts = _grouped(share, split[0])
    assert parts is not None
    return parts[index]


def _grouped(share: Share, sizes: Sequence[int]) -> list[Share] | None:
    """The pieces of each of the parts that a dimension is cut into; None where a cut is within a piece."""
    made, at = [], 0
    for size in sizes:
        whole: list[int] = []
        while sum(whole) < size and at + len(whole) < len(share.whole):
            whole.append(share.whole[at + len(whole)])
        if sum(whole) != size:
            return None
        made.append(Share(share.dim, tuple(whole), share.own[at : at + len(whole)]))
        at += len(whole)
    return made
