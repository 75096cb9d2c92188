"""Deterministic mode: whether every call has an implementation that says how it computes a row (`Impl.row_order`). The
first one that does is chosen, as it is in other modes the first of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphllm.compile.specialize import specialize
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.op import op_of
from graphllm.rewrite import candidates, choose, fake_values, site_of


def require_row_orders(pieces: Iterable[tuple[Mapping[str, Any], Bucket]], config: CompileConfig) -> None:
    """Raise ConfigError, before anything is compiled, for a call that is only computed in ways that depend on the
    others of a batch. pieces: each with a bucket that it is built for."""
    for piece, bucket in pieces:
        unit = specialize(piece, bucket, config).unit
        for node in unit.graph.nodes:
            op = op_of(node.target)
            if op is None:
                continue
            args, kwargs = fake_values((node.args, node.kwargs))
            site = site_of(op, op.bind(args, kwargs), unit.shapes, config, bucket)
            there = candidates(op, site)
            if there and choose(op, site) is None:
                raise ConfigError(
                    f"deterministic: no implementation of {op.name} for {config.target.device} computes a row in the "
                    f"same way in every batch, with this model and these settings: {', '.join(i.name for i in there)} "
                    "depend on the others of a batch; leave deterministic out"
                )
