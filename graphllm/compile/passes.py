"""The pipeline of passes as a literal list, with the places of plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphllm.config import ConfigError
from graphllm.passes.add_adapters import add_adapters
from graphllm.passes.attend_tree import attend_tree
from graphllm.passes.canonicalize import canonicalize
from graphllm.passes.fuse_attention import fuse_attention
from graphllm.passes.fuse_gate import fuse_gate
from graphllm.passes.fuse_linear import fuse_linear
from graphllm.passes.fuse_moe import fuse_moe
from graphllm.passes.quantize_activations import quantize_activations
from graphllm.passes.quantize_linear import quantize_linear
from graphllm.passes.quantize_moe import quantize_moe
from graphllm.passes.scale_cache import scale_cache
from graphllm.passes.select_early import select_early
from graphllm.passes.shard import shard
from graphllm.rewrite import Pass, registered_passes


class Pipeline(NamedTuple):
    """units: passes over one unit at a time (embed, one layer of each type, head, sampling), which may edit the weight
    plan.
    pieces: passes over one linked piece at one bucket's sizes, when weights and the cuts between pieces are settled.
    """

    units: tuple[Pass, ...]
    pieces: tuple[Pass, ...]


PIPELINE = Pipeline(
    units=(
        canonicalize,
        shard,
        add_adapters,
        quantize_linear,
        quantize_moe,
        scale_cache,
        attend_tree,
        fuse_attention,
    ),
    pieces=(
        select_early,
        fuse_moe,
        quantize_activations,
        fuse_linear,
        fuse_gate,
    ),
)


def pipeline() -> Pipeline:
    """The list with the passes of plugins, each after the pass that it names; several after one pass by their own
    names.

    Raises ConfigError for a pass that names none, or one that there is not.
    """
    return with_plugins(PIPELINE, registered_passes())


def with_plugins(listed: Pipeline, registered: Mapping[str, Pass]) -> Pipeline:
    """The ``listed`` passes and the other ``registered`` ones in their places; errors as in `pipeline`."""
    known = {p.name for p in (*listed.units, *listed.pieces)}
    others = [registered[name] for name in sorted(registered) if name not in known]
    found = Pipeline(*(tuple(_with_followers(p, others)) for p in listed))
    placed = {p.name for p in (*found.units, *found.pieces)}
    for p in others:
        if p.name not in placed:
            names = ", ".join(q.name for q in (*listed.units, *listed.pieces))
            raise ConfigError(f"pass {p.name}: after is {p.after!r}; name the pass after which it runs: {names}")
    return found


def _with_followers(passes: Sequence[Pass], others: Sequence[Pass]) -> list[Pass]:
    """The passes with plugins inserted: each plugin follows the pass named in its `after`, recursively."""
    return [q for p in passes for q in (p, *_with_followers([o for o in others if o.after == p.name], others))]
