"""The pipeline of passes as a literal list, and the places of plugins' passes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from graphllm.compile.pieces import require_implementations
from graphllm.compile.rewrites import plan_passes
from graphllm.compile.rewrites.contracts import GraphPass, LinkedPass, PlanPass
from graphllm.compile.rewrites.expert_counts import count_experts
from graphllm.compile.rewrites.keep_hidden import keep_hidden
from graphllm.compile.rewrites.sample_from_shares import sample_from_shares
from graphllm.compile.rewrites.split_layers import check_rules, split_layers
from graphllm.compile.row_order import require_row_orders
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.passes.add_adapters import add_adapters
from graphllm.passes.align_linear import align_linear
from graphllm.passes.attend_tree import attend_tree
from graphllm.passes.canonicalize import canonicalize
from graphllm.passes.fuse_attention import fuse_attention
from graphllm.passes.fuse_gate import fuse_gate
from graphllm.passes.fuse_linear import fuse_linear
from graphllm.passes.fuse_moe import fuse_moe
from graphllm.passes.join_shared_expert import join_shared_expert
from graphllm.passes.quantize_activations import quantize_activations
from graphllm.passes.quantize_linear import quantize_linear
from graphllm.passes.quantize_moe import quantize_moe
from graphllm.passes.scale_cache import scale_cache
from graphllm.passes.select_early import select_early
from graphllm.passes.shard import shard
from graphllm.passes.widen_linear import widen_linear
from graphllm.rewrite import Pass, registered_passes

# Raises ConfigError for linked pieces, each with a bucket, that the settings cannot have. The last argument:
# `Pipeline.pieces`.
Check = Callable[[Iterable[tuple[Mapping[str, Any], Bucket]], CompileConfig, Sequence[Pass]], None]


class Pipeline(NamedTuple):
    """Every rewrite that there is, in order.

    plan: over the weight plan, before the model is traced.
    graphs: over the traced units of a graph.
    units: over one unit at a time (embed, one layer of each type, head, sampling); they may edit the weight plan.
    linked: over a whole linked program, before it is cut into pieces. A second version of each program for steps with
        neutral inputs is made before (`graphllm.compile.rewrites.variants`).
    checks: of pieces, before anything is built.
    pieces: over one linked piece at one bucket's sizes, when weights and the cuts between pieces are settled.
    """

    plan: tuple[PlanPass, ...]
    graphs: tuple[GraphPass, ...]
    units: tuple[Pass, ...]
    linked: tuple[LinkedPass, ...]
    checks: tuple[Check, ...]
    pieces: tuple[Pass, ...]


PIPELINE = Pipeline(
    plan=(
        plan_passes.as_quantized,
        plan_passes.with_cache_scales,
        plan_passes.shard,
        plan_passes.share_experts,
        check_rules,
    ),
    graphs=(
        count_experts,
        keep_hidden,
        split_layers,
    ),
    units=(
        canonicalize,
        shard,
        add_adapters,
        quantize_linear,
        quantize_moe,
        join_shared_expert,
        align_linear,
        widen_linear,
        scale_cache,
        attend_tree,
        fuse_attention,
    ),
    linked=(sample_from_shares,),
    checks=(
        require_implementations,
        require_row_orders,
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
    """The list with the passes of plugins, each after the pass that it names; several after one by their own names.

    Raises ConfigError for a pass that names none, or one that there is not.
    """
    return with_plugins(PIPELINE, registered_passes())


def with_plugins(listed: Pipeline, registered: Mapping[str, Pass]) -> Pipeline:
    """The ``listed`` passes and the other ``registered`` ones in their places; errors as in `pipeline`."""
    known = {p.name for p in (*listed.units, *listed.pieces)}
    others = [registered[name] for name in sorted(registered) if name not in known]
    found = listed._replace(
        units=tuple(_inserted(listed.units, others)), pieces=tuple(_inserted(listed.pieces, others))
    )
    placed = {p.name for p in (*found.units, *found.pieces)}
    for p in others:
        if p.name not in placed:
            names = ", ".join(q.name for q in (*listed.units, *listed.pieces))
            raise ConfigError(f"pass {p.name}: after is {p.after!r}; name the pass after which it runs: {names}")
    return found


def _inserted(passes: Sequence[Pass], others: Sequence[Pass]) -> list[Pass]:
    """The passes with plugins inserted: each plugin follows the pass named in its `after`, recursively."""
    return [q for p in passes for q in (p, *_inserted([o for o in others if o.after == p.name], others))]
