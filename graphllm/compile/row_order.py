"""Deterministic mode: at all sizes that a call is compiled for, its rows are computed in one order, of those that its
implementations know (`Impl.row_order`), the first one that all sizes have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from graphllm.compile.specialize import specialize
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.op import Op, op_of
from graphllm.rewrite import ImplChoice, candidates, choices, fake_values, site_key, site_of


class _Site(NamedTuple):
    """A call in a bucket: what may compute it, and in which order."""

    op: Op
    bucket: Bucket
    offered: list[tuple[ImplChoice, str]]


def agree(pieces: Iterable[tuple[str, Mapping[str, Any], Bucket]], config: CompileConfig) -> dict[str, ImplChoice]:
    """What computes each call, by `site_key`: rows are bitwise equal in all buckets. pieces: each with its id and a
    bucket that it is built for. Raises ConfigError for a call that nothing computes so."""
    sites: dict[str, _Site] = {}
    calls: dict[tuple[str, str], list[str]] = {}  # by piece, and weight, or op and how many of it come before
    buckets: dict[str, list[Bucket]] = {}
    for piece, text, bucket in pieces:
        buckets.setdefault(piece, []).append(bucket)
        unit, before = specialize(text, bucket, config).unit, Counter[str]()
        for node in unit.graph.nodes:
            op = op_of(node.target)
            if op is None:
                continue
            args, kwargs = fake_values((node.args, node.kwargs))
            site = site_of(op, op.bind(args, kwargs), unit.shapes, config, bucket)
            if there := candidates(op, site):
                key = site_key(node, op, unit.shapes, bucket)
                sites[key] = _Site(op, bucket, choices(op, site))
                # What joins a linear layer may differ: it is known by its weight.
                weight = op.bind(node.args, node.kwargs).get("weight_OI")
                name = weight.name if isinstance(weight, torch.fx.Node) else f"{op.name} {before[op.name]}"
                calls.setdefault((piece, name), []).append(key)
                before[op.name] += 1
                if not sites[key].offered:
                    _refuse(op, config, f"{', '.join(i.name for i in there)} depend on the others of a batch")
    for (piece, name), keys in calls.items():
        if len(keys) != len(buckets[piece]):
            names = ", ".join(sites[k].bucket.name for k in keys)
            _refuse(sites[keys[0]].op, config, f"{name} of a piece is in the programs of {names} alone")
    found: dict[str, ImplChoice] = {}
    for joined in _joined(calls.values()):
        found |= _chosen({key: sites[key] for key in sorted(joined, key=lambda k: -sites[k].bucket.hi)}, config)
    return found


def _joined(calls: Iterable[list[str]]) -> list[set[str]]:
    """The sites of calls that share some of them, together: in one bucket two calls may look the same, and in another
    one of them has fewer rows."""
    groups: dict[str, set[str]] = {}
    for keys in calls:
        joined = set(keys).union(*(groups[k] for k in keys if k in groups))
        groups |= dict.fromkeys(joined, joined)
    return list({id(group): group for group in groups.values()}.values())


def _chosen(sites: Mapping[str, _Site], config: CompileConfig) -> dict[str, ImplChoice]:
    """What computes the sites of a call in one order."""
    first, *others = sites.values()
    known = [{order for _, order in site.offered} for site in others]
    order = next((o for _, o in first.offered if all(o in k for k in known)), None)
    if order is None:
        _refuse(first.op, config, f"none does it alike in {', '.join(site.bucket.name for site in sites.values())}")
    return {key: next(c for c, o in site.offered if o == order) for key, site in sites.items()}


def _refuse(op: Op, config: CompileConfig, why: str) -> NoReturn:
    raise ConfigError(
        f"deterministic: no implementation of {op.name} for {config.target.device} computes a row in the same way in "
        f"every batch, with this model and these settings: {why}; leave deterministic out"
    )
