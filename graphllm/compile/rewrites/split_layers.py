"""Graph rewrite: layers of one type that keep their weights in different ways become layers of several types, because a
pass does the same to all layers of a unit."""

from __future__ import annotations

import torch

from graphllm.compile.rewrites.contracts import PlanSource
from graphllm.compile.trace import TracedGraph
from graphllm.config import CompileConfig, ConfigError
from graphllm.rewrite import Unit
from graphllm.weights.plan.expr import Decode, walk
from graphllm.weights.plan.plan import WeightPlan
from graphllm.weights.plan.schemes import is_named, wanted_encoding

Kept = tuple[tuple[str, str | None, tuple[str, ...]], ...]


def split_layers(graph: TracedGraph, plan: WeightPlan, config: CompileConfig) -> TracedGraph:
    """The graph with a unit for each set of layers that store, and shall round, their weights alike."""
    types, units = list(graph.layer_types), dict(graph.units)
    for layer_type in dict.fromkeys(types):
        unit = units[f"layer.{layer_type}"]
        sets: dict[Kept, list[int]] = {}
        for i in unit.layers:
            sets.setdefault(_kept(plan, f"{unit.prefix}layers.{i}.", config), []).append(i)
        for number, layers in enumerate(sets.values()):
            name = f"{layer_type}.{number}" if number else layer_type
            for kind in ("layer", "context"):
                if (whole := graph.units.get(f"{kind}.{layer_type}")) is not None:
                    units[f"{kind}.{name}"] = _of_layers(whole, f"{unit.prefix}{kind}.{name}", layers)
            for i in layers:
                types[i] = name
    return graph._replace(units=units, layer_types=tuple(types))


def check_rules(plan: WeightPlan, source: PlanSource) -> WeightPlan:
    """The plan as it is. Raises ConfigError for a quantization rule that fits no weight."""
    for rule in source.config.quantization_rules:
        pattern = rule.rpartition("=")[0]
        if not any(is_named(plan, entry.name, pattern) for entry in plan):
            names = ", ".join(entry.name for entry in plan.entries[:4])
            raise ConfigError(f"quantization_rules: no weight is named {pattern!r:.80}; there are {names} ...")
    return plan


def _kept(plan: WeightPlan, start: str, config: CompileConfig) -> Kept:
    """How the weights of a layer are kept: as what they shall be rounded, and the encodings that they are stored in."""
    return tuple(
        (
            entry.name.removeprefix(start),
            wanted_encoding(plan, entry.name, config) if config.quantization_rules else None,
            tuple(e.encoding for e in walk(entry.expr) if isinstance(e, Decode)),
        )
        for entry in plan
        if entry.name.startswith(start)
    )


def _of_layers(unit: Unit, name: str, layers: list[int]) -> Unit:
    """The unit for some of its layers, with a graph of its own."""
    if len(layers) == len(unit.layers):
        return unit
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(unit.graph, {}))
    return unit._replace(name=name, graph=graph, layers=tuple(layers))
