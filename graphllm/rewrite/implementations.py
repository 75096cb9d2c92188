"""Which implementations an op has at a site: passes ask before they rewrite, lowering and tuning choose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from graphllm.config import Bucket, CompileConfig
from graphllm.ir.graph import Shapes, evaluate
from graphllm.ir.op import CallSite, Impl, Op
from graphllm.rewrite.unit import Unit, fake_values


class ImplChoice(NamedTuple):
    """The implementation of an op at a site, and its launch constants."""

    impl: str
    config: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.impl} {json.dumps(dict(self.config))}"


def candidates(op: Op, site: CallSite) -> list[Impl]:
    """The implementations for the target's device for which ``supports`` holds, in the order of their registration."""
    there = [i for i in op.impls.values() if i.device == site.target.device]
    return [i for i in there if i.supports(site)]


def choices(op: Op, site: CallSite) -> list[ImplChoice]:
    """The candidates with each of their launch constants. At deterministic sites only those with a known order of sums
    (`Impl.row_order`)."""
    found = [(i, constants) for i in candidates(op, site) for constants in i.configs(site)]
    return [ImplChoice(i.name, c) for i, c in found if not site.deterministic or i.row_order(site, c)]


def choose(op: Op, site: CallSite) -> ImplChoice | None:
    """The first of the `choices`."""
    return next(iter(choices(op, site)), None)


def site_of(op: Op, arguments: Mapping[str, Any], shapes: Shapes, config: CompileConfig, bucket: Bucket) -> CallSite:
    """The site of a call in a bucket. arguments: by parameter name, fake tensors of ``shapes`` for tensors."""
    limits = bucket.limits(config.max_num_seqs, config.longest_query)

    def largest(size: int | torch.SymInt) -> int:
        return int(evaluate(str(shapes.dim(size)), limits))

    return CallSite(op.bind((), arguments), config.target, bucket, largest, config.deterministic)


def is_implemented(unit: Unit, config: CompileConfig, op: Op, **arguments: Any) -> bool:
    """Whether an op that a pass would write has an implementation wherever the unit runs: at the piece's bucket, or, in
    a unit that is not linked yet, at every bucket. arguments: as for `Unit.replace`. The eager backend has none."""
    buckets = (unit.bucket,) if unit.bucket else config.buckets
    if config.backend == "eager" or not buckets:
        return False
    given = fake_values(arguments)
    sites = [site_of(op, given, unit.shapes, config, bucket) for bucket in buckets]
    return all(choose(op, site) is not None for site in sites)


def site_key(node: torch.fx.Node, op: Op, shapes: Shapes, bucket: Bucket) -> str:
    """What tells calls of an op in specialized pieces apart: its arguments, tensors by their specs, and the bucket."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: str(shapes.spec(n.meta["val"])))
    return f"{op.name} {bucket.name} {json.dumps(op.bind(args, kwargs))}"
