"""LOWER: choose an implementation for every op of a piece and trace the piece down to aten and kernel calls.

An op without a chosen implementation lowers to its reference body, which Inductor compiles and fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._pytree import tree_leaves

from graphllm.compile.codegen.results import as_the_body
from graphllm.compile.passes import pipeline
from graphllm.compile.pieces import trace_reference
from graphllm.compile.specialize import specialize
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.graph import GraphError, Shapes, TensorSpec
from graphllm.ir.graph_form import input_specs
from graphllm.ir.op import Op, op_of
from graphllm.rewrite import ImplChoice, choose, site_key, site_of

REFERENCE = ": reference"
Decompositions = Mapping[Any, Callable[..., Any]]
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_SUMS = ("sum", "mean", "var", "var_mean", "_softmax", "_log_softmax", "prod", "cumsum", "logsumexp")


class Lowered(NamedTuple):
    """A piece for one bucket: an aten graph, its fake inputs, and which implementation each op got, in graph order."""

    graph: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    shapes: Shapes
    chosen: tuple[str, ...]


def lower(
    piece: torch.fx.Graph,
    inputs: list[TensorSpec],
    config: CompileConfig,
    bucket: Bucket,
    chosen_at: Callable[[torch.fx.Node, Op], ImplChoice | None] = lambda node, op: None,
    decompositions: Decompositions = MappingProxyType({}),
) -> Lowered:
    """Retrace a piece at the bucket's sizes with the chosen implementations in place of the ops.

    chosen_at: what was measured at a node; where nothing was, the first one that applies is taken, with its first
        launch constants.
    decompositions: of torch's operators, which the backend does not know.

    Raises ConfigError for an op that nothing can compute here, GraphError when a dynamic size became a constant.
    """
    shapes = Shapes(config.target.device, bucket)
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
            site = site_of(op, op.bind(args, kwargs), shapes, config, bucket)
            choice = chosen_at(self.node, op)
            if choice is None:
                choice = choose(op, site)
            if choice is None:
                chosen.append(op.name + REFERENCE)
                return trace_reference(op, site)
            constants = ", ".join(f"{k}={v}" for k, v in choice.config.items())
            chosen.append(f"{op.name}: {choice.impl}" + (f" ({constants})" if constants else ""))
            made = op.impls[choice.impl].fn(**site.args, **choice.config)
            with disable_proxy_modes_tracing():
                body = node_target(*args, **kwargs)
            return as_the_body(made, body, shapes, f"{op.name}: the implementation {choice.impl}")

    module = torch.fx.GraphModule(torch.nn.Module(), piece)
    with shapes.mode, torch.no_grad():
        graph = make_fx(_Lowering(module).run, decomposition_table=dict(decompositions))(*fakes)
    if fixed := shapes.fixed():
        raise GraphError(
            f"lowering for {bucket.name} made {fixed} (with {'; '.join(chosen)}): an implementation used a dynamic "
            "size where a constant is needed, such as a launch constant of a kernel"
        )
    if config.deterministic:
        _check_references(
            graph.graph, [text.removesuffix(REFERENCE) for text in chosen if text.endswith(REFERENCE)], config
        )
    return Lowered(graph, fakes, shapes, tuple(chosen))


def lower_piece(
    piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice],
    decompositions: Decompositions,
) -> tuple[Lowered, list[dict[str, Any]]]:  # fmt: skip
    """A piece, specialized and lowered with the ``choices`` that were measured by site, and the passes' reports."""
    unit, reports = specialize(piece, bucket, config, pipeline().pieces)

    def chosen_at(node: torch.fx.Node, op: Op) -> ImplChoice | None:
        return choices.get(site_key(node, op, unit.shapes, bucket))

    return lower(unit.graph, input_specs(piece), config, bucket, chosen_at, decompositions), reports


def _check_references(graph: torch.fx.Graph, ops: Iterable[str], config: CompileConfig) -> None:
    """Raise ConfigError where the graph of a lowered piece has products of a library. Where several programs are
    generated, also refuse sums of floats, since the generator chooses their order for each program.

    ops: ops that were lowered to their references.
    """
    refused = _PRODUCTS + (_SUMS if len(config.buckets) > 1 else ())
    for node in graph.nodes:
        name = node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""
        floats = name in refused and any(v.is_floating_point() for v in tree_leaves(node.meta.get("val")))
        if floats:
            raise ConfigError(
                f"deterministic: {node.target} of one of {', '.join(sorted(set(ops)))}, which have no kernel for "
                f"{config.target.device} here, depends on the others of a batch; leave deterministic out"
            )
