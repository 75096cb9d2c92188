"""LOWER: choose an implementation for every op of a piece and trace the piece down to aten and kernel calls.

An op without a chosen implementation lowers to its reference body, which Inductor compiles and fuses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.inductor import decompositions
from graphllm.config import Bucket, Target
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ir.op import Impl, Op, Site, op_of


class Lowered(NamedTuple):
    """A piece for one bucket: an aten graph, its fake inputs, and which implementation each op got, in graph order."""

    graph: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    shapes: Shapes
    chosen: tuple[str, ...]


def choose(op: Op, site: Site) -> Impl | None:
    """The first registered implementation for the target's device whose ``supports`` holds."""
    for impl in op.impls.values():
        if impl.device == site.target.device and impl.supports(site):
            return impl
    return None


def lower(piece: torch.fx.Graph, inputs: list[TensorSpec], target: Target, bucket: Bucket) -> Lowered:
    """Retrace a piece at the bucket's sizes with the chosen implementations in place of the ops."""
    shapes = Shapes(target.device, bucket)
    fakes = [shapes.tensor(spec) for spec in inputs]
    chosen: list[str] = []

    class _Lowering(torch.fx.Interpreter):
        def call_function(self, node_target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            op = op_of(node_target)
            if op is None:
                return node_target(*args, **kwargs)
            bound = op.bind(args, kwargs)
            impl = choose(op, Site(bound, target, bucket))
            chosen.append(f"{op.name}: {impl.name if impl else 'reference'}")
            return (impl.fn if impl else op.reference)(**bound)

    module = torch.fx.GraphModule(torch.nn.Module(), piece)
    with shapes.mode, torch.no_grad():
        graph = make_fx(_Lowering(module).run, decomposition_table=decompositions())(*fakes)
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
    return choose(op, Site(op.bind(args, kwargs), target, bucket)) is None
