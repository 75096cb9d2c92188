"""SPECIALIZE: one linked piece at one bucket's sizes, rewritten by the passes that look at them, then lowered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from graphllm.compile.lower import Lowered, lower, trace_reference
from graphllm.compile.passes import pipeline
from graphllm.config import Bucket, CompileConfig
from graphllm.ir.graph import Shapes, from_json, input_specs
from graphllm.ir.op import Op, op_of
from graphllm.rewrite import ImplChoice, Unit, choose, fake_values, site_key, site_of
from graphllm.weights.plan import WeightPlan


def lower_piece(
    piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice]
) -> tuple[Lowered, list[dict[str, Any]]]:
    """A piece, specialized and lowered with the ``choices`` that were measured by site, and the passes' reports."""
    unit, reports = specialize(piece, bucket, config)

    def chosen_at(node: torch.fx.Node, op: Op) -> ImplChoice | None:
        return choices.get(site_key(node, op, unit.shapes, bucket))

    return lower(unit.graph, input_specs(piece), config, bucket, chosen_at), reports


class Special(NamedTuple):
    """The piece as a unit with fake values of the bucket's sizes, and the passes' reports where they changed it."""

    unit: Unit
    reports: list[dict[str, Any]]


def specialize(piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig) -> Special:
    """Rewrite a piece, given by its canonical JSON, for a bucket."""
    unit = unit_of(piece, bucket, config)
    reports = []
    for p in pipeline().pieces:
        report, record = p.apply(unit, WeightPlan(()), config)
        if report.changed:
            reports.append(record)
    return Special(unit, reports)


def unit_of(piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig) -> Unit:
    """A piece, given by its canonical JSON, with fake values of the bucket's sizes."""
    graph, shapes = from_json(piece), Shapes(config.target.device, bucket)
    name = f"piece {piece['nodes'][0][0]} for {bucket.name}"
    fakes = iter([shapes.tensor(spec) for spec in input_specs(piece)])
    with shapes.mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta.update(val=next(fakes), label=node.name)
            elif node.op == "call_function":
                args, kwargs = fake_values((node.args, node.kwargs))
                node.meta["val"] = node.target(*args, **kwargs)
    return Unit(name, graph, tuple(f"o{i}" for i in range(len(piece["made"]))), shapes, bucket)


def require_implementations(pieces: Iterable[Mapping[str, Any]], config: CompileConfig) -> None:
    """Raise ConfigError, before anything is compiled, for a call that nothing can compute at some bucket: of an op
    without an implementation there whose reference needs data. Only references that need a fake can be such."""
    for piece in pieces:
        if any(op.has_fake for node in from_json(piece).nodes if (op := op_of(node.target))):
            for bucket in config.buckets:
                unit = unit_of(piece, bucket, config)
                with unit.shapes.mode, torch.no_grad():
                    for node in unit.graph.nodes:
                        op = op_of(node.target)
                        if op is not None and op.has_fake:
                            args, kwargs = fake_values((node.args, node.kwargs))
                            site = site_of(op, op.bind(args, kwargs), unit.shapes, config, bucket)
                            if choose(op, site) is None:
                                trace_reference(op, site)
