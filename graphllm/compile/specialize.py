"""SPECIALIZE: one linked piece at one bucket's sizes, rewritten by the passes that look at them. Imports nothing of
Inductor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from graphllm.compile.passes import pipeline
from graphllm.compile.pieces import unit_of
from graphllm.config import Bucket, CompileConfig
from graphllm.rewrite import Unit
from graphllm.weights.plan.plan import WeightPlan


class SpecializedPiece(NamedTuple):
    """The piece as a unit with fake values of the bucket's sizes, and the passes' reports where they changed it."""

    unit: Unit
    reports: list[dict[str, Any]]


def specialize(piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig) -> SpecializedPiece:
    """Rewrite a piece, given by its canonical JSON, for a bucket."""
    unit = unit_of(piece, bucket, config)
    reports = []
    for p in pipeline().pieces:
        report, record = p.apply(unit, WeightPlan(()), config)
        if report.changed:
            reports.append(record)
    return SpecializedPiece(unit, reports)
