"""SPECIALIZE: one linked piece at one bucket's sizes, rewritten by the passes that look at them, then lowered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from graphllm.compile.lower import ImplChoice, Lowered, lower, site_key
from graphllm.compile.passes import Stage, Unit, ordered_passes
from graphllm.config import Bucket, CompileConfig
from graphllm.ir.graph import Shapes, from_json, input_specs
from graphllm.ir.op import Op
from graphllm.weights.plan import WeightPlan


def lower_piece(
    piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice]
) -> tuple[Lowered, list[dict[str, Any]]]:
    """A piece, specialized and lowered with the ``choices`` that were measured by site, and the passes' reports."""
    unit, reports = specialize(piece, bucket, config)

    def chosen_at(node: torch.fx.Node, op: Op) -> ImplChoice | None:
        return choices.get(site_key(node, op, unit.shapes, bucket))

    return lower(unit.graph, input_specs(piece), config.target, bucket, chosen_at), reports


class Special(NamedTuple):
    """The piece as a unit with fake values of the bucket's sizes, and the passes' reports where they changed it."""

    unit: Unit
    reports: list[dict[str, Any]]


def specialize(piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig) -> Special:
    """Rewrite a piece, given by its canonical JSON, for a bucket."""
    graph, shapes = from_json(piece), Shapes(config.target.device, bucket)
    name = f"piece {piece['nodes'][0][0]} for {bucket.name}"
    unit = Unit(name, graph, tuple(f"o{i}" for i in range(len(piece["made"]))), shapes, bucket)
    fakes = iter([shapes.tensor(spec) for spec in input_specs(piece)])
    with shapes.mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta.update(val=next(fakes), label=node.name)
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
    reports = []
    for p in ordered_passes():
        if p.stage is Stage.SPECIALIZE:
            report, record = p.apply(unit, WeightPlan(()), config)
            if report.changed:
                reports.append(record)
    return Special(unit, reports)
