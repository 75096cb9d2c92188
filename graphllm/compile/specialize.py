"""SPECIALIZE: one linked piece at one bucket's sizes, rewritten by the passes that look at them. Imports nothing of
Inductor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphllm.compile.pieces import unit_of
from graphllm.config import Bucket, CompileConfig
from graphllm.rewrite import Pass, Unit
from graphllm.weights.plan.plan import WeightPlan


class SpecializedPiece(NamedTuple):
    """The piece as a unit with fake values of the bucket's sizes, and the reports of the passes that changed it."""

    unit: Unit
    reports: list[dict[str, Any]]


def specialize(
    piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, passes: Sequence[Pass]
) -> SpecializedPiece:
    """Rewrite a piece, given by its canonical JSON, for a bucket. passes: `Pipeline.pieces`."""
    unit = unit_of(piece, bucket, config)
    reports = []
    for p in passes:
        report, record = p.apply(unit, WeightPlan(()), config)
        if report.changed:
            reports.append(record)
    return SpecializedPiece(unit, reports)
