"""Deterministic mode: whether every call has an implementation that says how it computes a row (`Impl.row_order`), and
the same way in the programs of all buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from graphllm.compile.specialize import specialize
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.op import CallSite, Op, op_of
from graphllm.rewrite import Pass, candidates, choices, fake_values, site_of


def require_row_orders(
    pieces: Iterable[tuple[Mapping[str, Any], Bucket]], config: CompileConfig, passes: Sequence[Pass]
) -> None:
    """Raise ConfigError, before anything is compiled, for a call that is only computed in ways that depend on the
    others of a batch, or otherwise in one bucket than in another. Without the setting deterministic nothing is checked.
    pieces: each with a bucket that it is built for. passes:
    `Pipeline.pieces`."""
    if not config.deterministic:
        return
    known: dict[tuple[int, str], tuple[str, Bucket]] = {}
    for piece, bucket in pieces:
        unit, before = specialize(piece, bucket, config, passes).unit, Counter[str]()
        for node in unit.graph.nodes:
            op = op_of(node.target)
            if op is None:
                continue
            args, kwargs = fake_values((node.args, node.kwargs))
            site = site_of(op, op.bind(args, kwargs), unit.shapes, config, bucket)
            there = candidates(op, site)
            if not there:
                continue
            offered = choices(op, site)
            if not offered:
                _refuse(op, config, f"{', '.join(i.name for i in there)} depend on the others of a batch")
            if len(config.buckets) == 1:
                continue
            # What joins a linear layer may differ from bucket to bucket: it is known by its weight.
            weight = op.bind(node.args, node.kwargs).get("weight_OI")
            call = weight.name if isinstance(weight, torch.fx.Node) else f"{op.name} {before[op.name]}"
            before[op.name] += 1
            for choice in offered:
                own = _order(site, op.impls[choice.impl].row_order(site, choice.config))
                first, of = known.setdefault((id(piece), call), (own, bucket))
                if own != first:
                    _refuse(op, config, f"{call} is {first} in {of.name}, but {own} in {bucket.name}")


def _order(site: CallSite, order: str) -> str:
    """The order, and what of that which may join a product does: its sums are then rounded after it and not before."""
    given = [name for name, value in site.args.items() if isinstance(value, torch.Tensor) or value is True]
    return ", ".join([order, *(n for n in ("residual", "gated") if any(g.startswith(n) for g in given))])


def _refuse(op: Op, config: CompileConfig, why: str) -> NoReturn:
    raise ConfigError(
        f"deterministic: no implementation of {op.name} for {config.target.device} computes a row in the same way in "
        f"every batch, with this model and these settings: {why}; leave deterministic out"
    )
