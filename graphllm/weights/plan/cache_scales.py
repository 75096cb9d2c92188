"""Scales that a checkpoint brings for keys and values of a cache in fp8, as entries of the weight plan. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from graphllm.config import ConfigError
from graphllm.weights.plan.expr import Concat, Expr, Read, Reshape, Values, walk
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.schemes import Stored

NAME = "kv_scales"
# Behind the name of a layer's attention: of compressed-tensors and ModelOpt, of AutoFP8, and vLLM's own.
_NAMES = ("{x}_proj.{x}_scale", "{x}_scale", "attn.{x}_scale", "{x}_proj.output_scale", "kv_scale", "attn.kv_scale")


def with_cache_scales(plan: WeightPlan, stored: Stored | None) -> WeightPlan:
    """The plan with ``<layer>.kv_scales`` [2], of keys and values, for every layer, if the checkpoint has such a scale;
    what it does not have is 1. stored: its tensors. Raises ConfigError for several scales of one layer."""
    if not stored:
        return plan
    layers: dict[str, list[Entry]] = {}
    for entry in plan:
        if found := re.match(r"(?:.*\.)?layers\.\d+(?=\.)", entry.name):
            layers.setdefault(found[0], []).append(entry)
    scales = {layer: [_scale(x, entries, stored) for x in "kv"] for layer, entries in layers.items()}
    if not any(isinstance(e, Reshape) for parts in scales.values() for e in parts):
        return plan
    last = {entries[-1].name: layer for layer, entries in layers.items()}
    made: list[Entry] = []
    for entry in plan:
        made.append(entry)
        if layer := last.get(entry.name):
            made.append(Entry(f"{layer}.{NAME}", (2,), "float32", Concat(tuple(scales[layer])), exact=True))
    return WeightPlan(tuple(made))


def _scale(x: str, entries: Sequence[Entry], stored: Stored) -> Expr:
    reads = (e for entry in entries if not entry.tie for e in walk(entry.expr) if isinstance(e, Read))
    modules = dict.fromkeys(source.rpartition(".")[0].rpartition(".")[0] for e in reads for source in e.sources)
    for name in (f"{module}.{ending.format(x=x)}" for module in modules for ending in _NAMES):
        if name in stored:
            if math.prod(shape := stored[name].shape) != 1:
                raise ConfigError(f"{name} has shape {list(shape)}: a cache in fp8 has one scale a layer; use int8")
            return Reshape(Read((name,), shape), (1,))
    return Values((1.0,), (1,))
