"""Divide a weight plan among the ranks of a tensor-parallel group. One plan serves them all: slices go by the symbol
rank, which the loader knows. No torch."""

from __future__ import annotations

import dataclasses

from graphllm.config import ConfigError
from graphllm.weights.expr import Concat, Expr, Slice
from graphllm.weights.plan import Entry, WeightPlan
from graphllm.weights.simplify import simplify


def shard_plan(plan: WeightPlan, degree: int) -> WeightPlan:
    """The plan of one rank's share, as the entries say: "output" and "expert" divide, each segment by itself, and
    "input" divides the last dimension. "vocab" is copied to every rank.

    Raises ConfigError for what cannot be divided evenly.
    """
    return WeightPlan(tuple(_divided(e, degree) for e in plan)) if degree > 1 else plan


def _divided(entry: Entry, degree: int) -> Entry:
    if entry.shard is None or entry.shard == "vocab":
        return entry
    if entry.tie:
        raise ValueError(f"{entry.name}: tied to {entry.tie}; a parameter that is divided cannot be")
    dim, segments = _cut(entry)
    for length in segments:
        if length % degree:
            raise ConfigError(
                f"tensor_parallel_size is {degree}: {entry.name} has {length} entries to divide; use a divisor of it"
            )
    parts: list[Expr] = []
    at = 0
    for length in segments:
        share = length // degree
        parts.append(Slice(Slice(entry.expr, dim, at, at + length), dim, 0, share, share))
        at += length
    expr = simplify(Concat(tuple(parts), dim))
    shape = (*entry.shape[:dim], entry.shape[dim] // degree, *entry.shape[dim + 1 :])
    local = tuple(n // degree for n in entry.segments) if entry.shard == "output" else entry.segments
    return dataclasses.replace(entry, shape=shape, expr=expr, segments=local)


def _cut(entry: Entry) -> tuple[int, tuple[int, ...]]:
    """The dimension that is divided, and the lengths of what is divided by itself."""
    experts = entry.expert_axis
    if entry.shard == "expert":
        if experts is None:
            raise ValueError(f'{entry.name}: shard="expert" needs expert_axis')
        return experts, (entry.shape[experts],)
    if entry.shard == "input":
        return len(entry.shape) - 1, (entry.shape[-1],)
    dim = 0 if experts is None else experts + 1
    total = entry.shape[dim]
    segments = entry.segments or (total,)
    if experts is not None:  # they list the parts of every expert
        segments = segments[: len(segments) // entry.shape[experts]] or (total,)
    if sum(segments) != total:
        raise ValueError(f"{entry.name}: segments {entry.segments} do not add up to {total}")
    return dim, segments
