"""Linked pieces at the sizes of a bucket, and the check, before anything is compiled, that their ops can be computed.

Imports nothing of Inductor, so that a setting that cannot work is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.graph import Shapes
from graphllm.ir.graph_form import from_json, input_specs
from graphllm.ir.op import CallSite, Op, op_of
from graphllm.rewrite import Pass, Unit, choose, fake_values, site_of


def unit_of(piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig) -> Unit:
    """A piece, given by its canonical JSON, with fake values of the bucket's sizes."""
    graph, shapes = from_json(piece), Shapes(config.target.device, bucket)
    name = f"piece {piece['nodes'][0][0]} for {bucket.name}"
    fakes = iter([shapes.tensor(spec) for spec in input_specs(piece)])
    with shapes.mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta.update(val=next(fakes), label=node.name)
            elif node.op == "call_function":
                args, kwargs = fake_values((node.args, node.kwargs))
                node.meta["val"] = node.target(*args, **kwargs)
    return Unit(name, graph, tuple(f"o{i}" for i in range(len(piece["made"]))), shapes, bucket)


def require_implementations(
    jobs: Iterable[tuple[Mapping[str, Any], Bucket]], config: CompileConfig, passes: Sequence[Pass] = ()
) -> None:
    """Raise ConfigError, before anything is compiled, for a call that nothing can compute in one of the pieces at its
    bucket: of an op that has no implementation there and needs data in its reference. The backend eager runs
    references."""
    if config.backend == "eager":
        return
    for piece, bucket in jobs:
        if not any(op.untraceable for node in from_json(piece).nodes if (op := op_of(node.target))):
            continue
        unit = unit_of(piece, bucket, config)
        with unit.shapes.mode, torch.no_grad():
            for node in unit.graph.nodes:
                op = op_of(node.target)
                if op is not None and op.untraceable:
                    args, kwargs = fake_values((node.args, node.kwargs))
                    site = site_of(op, op.bind(args, kwargs), unit.shapes, config, bucket)
                    if choose(op, site) is None:
                        trace_reference(op, site)


def trace_reference(op: Op, site: CallSite) -> Any:
    """Run the reference on tensors without data. Raises ConfigError, with what a user can do, where it needs data: such
    an op runs compiled only where it has an implementation. Ops that are no boundary keep what torch makes of them by
    default, which Inductor fuses best."""
    try:
        return op.traced(**site.args) if op.boundary else op.reference(**site.args)
    except Exception as problem:
        if not op.untraceable:
            raise
        own = [impl for impl in op.impls.values() if impl.device == site.target.device]
        remedies = dict.fromkeys(remedy for impl in own if (remedy := impl.remedy(site)))
        raise ConfigError(
            f"op {op.name}: no implementation for {site.target.device} serves this model and these settings, and its "
            f"reference cannot be compiled. {'. '.join(remedies) or 'Use the backend eager, or add an implementation'}"
        ) from problem
