"""LOWER: choose an implementation for every op of a piece and trace the piece down to aten and kernel calls.

An op without a chosen implementation lowers to its reference body, which Inductor compiles and fuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.inductor import decompositions
from graphllm.config import Bucket, Target
from graphllm.ir.graph import GraphError, Shapes, TensorSpec
from graphllm.ir.op import CallSite, Impl, Op, op_of


class Lowered(NamedTuple):
    """A piece for one bucket: an aten graph, its fake inputs, and which implementation each op got, in graph order."""

    graph: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    shapes: Shapes
    chosen: tuple[str, ...]


def choose(op: Op, site: CallSite) -> Impl | None:
    """The first registered implementation for the target's device whose ``supports`` holds."""
    for impl in op.impls.values():
        if impl.device == site.target.device and impl.supports(site):
            return impl
    return None


class ImplChoice(NamedTuple):
    """The implementation of an op at a site, and its launch constants."""

    impl: str
    config: Mapping[str, Any]


def site_of(node: torch.fx.Node, op: Op, target: Target, bucket: Bucket) -> CallSite:
    """The site of an op's call in a specialized piece."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return CallSite(op.bind(args, kwargs), target, bucket)


def site_key(node: torch.fx.Node, op: Op, shapes: Shapes, bucket: Bucket) -> str:
    """What tells calls of an op in specialized pieces apart: its arguments, tensors by their specs, and the bucket."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: str(shapes.spec(n.meta["val"])))
    return f"{op.name} {bucket.name} {json.dumps(op.bind(args, kwargs))}"


def lower(
    piece: torch.fx.Graph,
    inputs: list[TensorSpec],
    target: Target,
    bucket: Bucket,
    chosen_at: Callable[[torch.fx.Node, Op], ImplChoice | None] = lambda node, op: None,
) -> Lowered:
    """Retrace a piece at the bucket's sizes with the chosen implementations in place of the ops.

    chosen_at: what was measured at a node; where nothing was, the first one that applies is taken, with its first
    launch constants. Raises GraphError when a dynamic size became a constant.
    """
    shapes = Shapes(target.device, bucket)
    fakes = [shapes.tensor(spec) for spec in inputs]
    chosen: list[str] = []

    class _Lowering(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            self.node = n
            return super().run_node(n)

        def call_function(self, node_target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            op = op_of(node_target)
            if op is None:
                return node_target(*args, **kwargs)
            bound = op.bind(args, kwargs)
            site = CallSite(bound, target, bucket)
            choice = chosen_at(self.node, op)
            if choice is None:
                impl = choose(op, site)
                choice = ImplChoice(impl.name, impl.configs(site)[0]) if impl else None
            if choice is None:
                chosen.append(f"{op.name}: reference")
                return op.reference(**bound)
            constants = ", ".join(f"{k}={v}" for k, v in choice.config.items())
            chosen.append(f"{op.name}: {choice.impl}" + (f" ({constants})" if constants else ""))
            return op.impls[choice.impl].fn(**bound, **choice.config)

    module = torch.fx.GraphModule(torch.nn.Module(), piece)
    with shapes.mode, torch.no_grad():
        graph = make_fx(_Lowering(module).run, decomposition_table=decompositions())(*fakes)
    if fixed := shapes.fixed():
        raise GraphError(
            f"lowering for {bucket.name} made {fixed} (with {'; '.join(chosen)}): an implementation used a dynamic "
            "size where a constant is needed, such as a launch constant of a kernel"
        )
    return Lowered(graph, fakes, shapes, tuple(chosen))


def needs_reference(piece: torch.fx.Graph, inputs: list[TensorSpec], target: Target, bucket: Bucket) -> bool:
    """Whether the piece is a lone boundary op without an implementation: its reference reads data on the host, so it
    cannot be traced and the piece runs through the interpreter."""
    calls = [n for n in piece.nodes if n.op == "call_function"]
    op = op_of(calls[0].target) if len(calls) == 1 else None
    if op is None or not op.boundary:
        return False
    shapes = Shapes(target.device, bucket)
    env = {n: shapes.tensor(s) for n, s in zip(piece.find_nodes(op="placeholder"), inputs, strict=True)}
    args, kwargs = torch.fx.map_arg((calls[0].args, calls[0].kwargs), lambda n: env[n])
    return choose(op, CallSite(op.bind(args, kwargs), target, bucket)) is None
