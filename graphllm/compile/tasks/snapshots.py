"""Snapshots of recurrent states in 8 bits: a graph without layers, with one program that saves and one that loads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from graphllm.compile.tasks.task import ProgramUnits, Task, TaskUnit, Values
from graphllm.config import Bucket, CompileConfig
from graphllm.ir.model import Graph, Model
from graphllm.ir.op import all_ops
from graphllm.ops.recurrent.load_snapshots import load_snapshots
from graphllm.ops.recurrent.save_snapshots import save_snapshots
from graphllm.program.snapshots import PREFIX
from graphllm.program.specs import InputSpec

EXPORTS = "exports"  # argument of ops that write recurrent states


class Snapshots(Task):
    """A run copies states of slots to snapshots, or back; its sequences are pairs of both."""

    def inputs(self) -> tuple[InputSpec, ...]:
        """What belongs to the entries ``slots``; -1 for padding, of which nothing is copied."""
        return (InputSpec("snapshots", ("S",), neutral=-1),)

    def buckets(self) -> tuple[Bucket, ...]:
        most = self.config.max_num_seqs
        return (Bucket("decode", 1, 1), *((Bucket("decode", 2, most),) if most > 1 else ()))

    def programs(self, inputs: Collection[InputSpec], caches: Sequence[tuple[str, int]]) -> Mapping[str, ProgramUnits]:
        """ "save" and "load"."""
        units = {"save": TaskUnit("save", save, ()), "load": TaskUnit("load", load, ())}
        return {name: ProgramUnits(after=(unit,), own=()) for name, unit in units.items()}


def with_snapshots(model: Model, config: CompileConfig) -> Model:
    """The family, with the graph of this task where snapshots are of 8 bits."""
    return model if config.snapshot_dtype == "auto" else dataclasses.replace(model, graphs=(*model.graphs, _GRAPH))


def may_export(config: CompileConfig) -> bool:
    """Whether some kernel for the device leaves states inside of chunks. References do."""
    impls = (i for op in all_ops().values() if EXPORTS in op.signature.parameters for i in op.impls.values())
    device = config.target.device
    return config.backend == "eager" or any(is_exporting(i.fn) and i.device == device for i in impls)


def is_exporting(fn: Callable[..., Any]) -> bool:
    """See `graphllm.ops.recurrent.slots.exporting`."""
    return bool(getattr(fn, "exporting", False))


def save(v: Values) -> tuple[()]:
    """Write all recurrent states of slots to snapshots."""
    for name in _kinds(v):
        save_snapshots(
            v[name + "states"], v[name + "rest"], v.get("state.version"), v["step.slots"], v["step.snapshots"],
            v[name + "codes"], v[name + "scales"], v[name + "kept"],
        )  # fmt: skip
    return ()


def load(v: Values) -> tuple[()]:
    """Write snapshots to all recurrent states of slots."""
    for name in _kinds(v):
        load_snapshots(
            v[name + "codes"], v[name + "scales"], v[name + "kept"], v["step.slots"], v["step.snapshots"],
            v[name + "states"], v[name + "rest"],
        )  # fmt: skip
    return ()


def _kinds(v: Values) -> list[str]:
    """What the names of each kind's places begin with."""
    names = (f"{PREFIX}{number}." for number in itertools.count())
    return list(itertools.takewhile(lambda name: name + "states" in v, names))


_GRAPH = Graph(
    layer_types=lambda c: (),
    embed_weights=lambda c: {},
    layer_weights=lambda c, layer_type: {},
    head_weights=lambda c: {},
    embed=lambda c, w, ctx: (ctx.inputs.slots, ()),
    layer=lambda c, layer_type, w, x, ctx: x,
    head=lambda c, w, x, ctx: None,
    task="snapshots",
    name="snapshots",
)
