"""A weight plan of given weights, without a model's graph, and a loader that reads little at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from graphllm.ir.model import Model
from graphllm.ir.weight import Weight
from graphllm.weights.loading import loader, readers
from graphllm.weights.plan.plan import WeightPlan, make_plan

Weights = Mapping[str, Weight]


def model_of(
    embed: Weights,
    layer: Callable[[Any, str], Weights] | None = None,
    head: Weights | None = None,
    kinds: Sequence[str] = (),
) -> Model:
    """Only what a plan is made of. layer: weights of a layer, by config and kind. kinds: of the layers."""
    fake = SimpleNamespace(
        prefix="",
        layer_types=lambda c: tuple(kinds),
        embed_weights=lambda c: embed,
        layer_weights=layer or (lambda c, kind: {}),
        head_weights=lambda c: head or {},
        project_weights=lambda c: {},
    )
    return cast(Model, SimpleNamespace(graphs=(fake,)))


def plan_of(weights: Weights, dtype: str = "float32") -> WeightPlan:
    """The plan of a model of these weights only."""
    return make_plan(model_of(weights), None, dtype)


@contextmanager
def small_reads() -> Iterator[None]:
    """So that tensors of some hundred bytes take many reads."""
    with (
        mock.patch.multiple(loader, _CHUNK=64, _STAGE=48, _EVALUATED={"cpu": 64}),
        mock.patch.object(readers, "_GRAIN", 5),
    ):
        yield
