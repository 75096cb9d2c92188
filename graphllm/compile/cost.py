"""What a step must at least read and compute, by bucket: the sum of its ops' cost formulas, kept in the manifest for
`graphllm doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphllm.compile.codegen.example_inputs import example
from graphllm.compile.link import Linked
from graphllm.compile.trace import TracedGraph
from graphllm.config import Bucket
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ir.op import Cost, op_of
from graphllm.program import manifest
from graphllm.rewrite import fake_values


def step_costs(
    graphs: Sequence[TracedGraph],
    linked: Linked,
    buckets: Sequence[Sequence[Bucket]],
    shapes: Shapes,
    max_num_seqs: int,
) -> dict[str, manifest.Cost]:
    """Bytes and operations of a full step of each bucket and program. Ops that cut a step into pieces are left out:
    what attention reads is known by the lengths only.

    buckets: of each graph.
    shapes: of the pieces.
    """
    found = {}
    for number, graph in enumerate(graphs):
        for bucket in buckets[number]:
            sizes = bucket.limits(max_num_seqs)
            costs = {piece.id: _cost(piece.graph, shapes, sizes) for piece in linked.pieces_of(number)}
            for name, program in linked.programs[number].items():
                run = [costs[call.piece] for call in program.calls]
                found[f"{bucket.name} {graph.graph.prefix}{name}"] = manifest.Cost(
                    bytes=sum(cost.bytes for cost in run), flops=sum(cost.flops for cost in run)
                )
    return found


def _cost(graph: torch.fx.Graph, shapes: Shapes, sizes: Mapping[str, int]) -> Cost:
    """Of a piece at these sizes."""

    def sized(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            spec = shapes.spec(value)
            assert isinstance(spec, TensorSpec)
            return example(spec, sizes, "meta")
        return value

    total = Cost(0, 0)
    for node in graph.nodes:
        op = op_of(node.target)
        if op is None or op.boundary:
            continue
        args, kwargs = fake_values((node.args, node.kwargs))
        cost = op.cost(**{name: sized(value) for name, value in op.bind(args, kwargs).items()})
        total = Cost(total.bytes + cost.bytes, total.flops + cost.flops)
    return total
