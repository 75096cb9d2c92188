"""SPECIALIZE: one linked piece at one bucket's sizes, rewritten by the passes that look at them, then lowered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from graphllm.compile.lower import Lowered, lower
from graphllm.compile.passes import pipeline
from graphllm.compile.pieces import unit_of
from graphllm.config import Bucket, CompileConfig
from graphllm.ir.graph import input_specs
from graphllm.ir.op import Op
from graphllm.rewrite import ImplChoice, Unit, site_key
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
