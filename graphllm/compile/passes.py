"""The contract of a pass: one function over a graph and the weight plan, with a report; and the registry of passes."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from graphllm.config import Bucket, CompileConfig
from graphllm.ir.graph import Shapes, verify
from graphllm.weights.plan import WeightPlan


class Stage(enum.IntEnum):
    """When a pass runs. CANONICALIZE to FUSE see one unit (embed, one layer of each kind, head) at a time; SPECIALIZE
    sees one linked piece at one bucket, when weights and the cuts between pieces are settled."""

    CANONICALIZE = 1
    QUANTIZE = 2
    SHARD = 3
    LORA = 4
    FUSE = 5
    SPECIALIZE = 6


class Unit(NamedTuple):
    """The traced graph of one unit: "embed", "layer.<type>", "head", or one of the sampling programs'.

    inputs and outputs name the values in order: "w.<weight>", "step.<input>", "state.<state>", "x", "shared.<i>", and
    what heads and sampling make. layers: the indices of the layers that a "layer.<type>" stands for. prefix: of a
    further graph's names. At SPECIALIZE it is a piece, with inputs "p<i>" and outputs "o<i>", and ``bucket`` says which
    sizes its fake values have.
    """

    name: str
    graph: torch.fx.Graph
    outputs: tuple[str, ...]
    shapes: Shapes
    bucket: Bucket | None = None
    layers: tuple[int, ...] = ()
    prefix: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the placeholders are, in order."""
        return tuple(n.meta["label"] for n in self.graph.find_nodes(op="placeholder"))

    def entries(self, weight: str) -> tuple[str, ...]:
        """The names in the weight plan of what the unit takes as "w.<weight>": one, or one for each layer."""
        owners = tuple(f"{self.prefix}layers.{i}" for i in self.layers) or (self.name,)
        return tuple(f"{owner}.{weight}" for owner in owners)


def results_of(unit: Unit) -> list[torch.fx.Node]:
    """The nodes a unit returns, in the order of ``outputs``."""
    returned: Any = unit.graph.output_node().args[0]
    return list(returned)


class PassReport(NamedTuple):
    """What a pass did: how many places it changed and, for people, what they were. plan: the edited plan, if it was."""

    changed: int
    notes: tuple[str, ...] = ()
    plan: WeightPlan | None = None


@dataclass(frozen=True)
class Pass:
    """A registered pass. numerics: "bitwise" leaves every result as it was, "reorders" changes rounding only,
    "changes" alters the computation (quantization). after: passes of the same stage that must run before."""

    name: str
    stage: Stage
    numerics: Literal["bitwise", "reorders", "changes"]
    after: tuple[str, ...]
    run: Callable[[Unit, WeightPlan, CompileConfig], PassReport]

    def apply(self, unit: Unit, plan: WeightPlan, config: CompileConfig) -> tuple[PassReport, dict[str, Any]]:
        """Run on a unit, which is verified afterwards: the report, and what the manifest says of it."""
        start = time.perf_counter()
        report = self.run(unit, plan, config)
        milliseconds = round(1e3 * (time.perf_counter() - start), 2)
        verify(unit.graph, f"{unit.name} after {self.name}")
        return report, {
            "pass": self.name, "stage": self.stage.name, "numerics": self.numerics, "unit": unit.name,
            "changed": report.changed, "notes": list(report.notes), "ms": milliseconds,
        }  # fmt: skip


_passes: dict[str, Pass] = {}


def register_pass(
    *, stage: Stage, numerics: Literal["bitwise", "reorders", "changes"], after: tuple[str, ...] = ()
) -> Callable[[Callable[[Unit, WeightPlan, CompileConfig], PassReport]], Callable[..., PassReport]]:
    """Make a pass known. It edits ``unit.graph`` in place and reads nothing else than its arguments."""

    def register(fn: Callable[[Unit, WeightPlan, CompileConfig], PassReport]) -> Callable[..., PassReport]:
        if fn.__name__ in _passes:
            raise ValueError(f"a pass named {fn.__name__!r} is already registered; choose another name")
        _passes[fn.__name__] = Pass(fn.__name__, stage, numerics, after, fn)
        return fn

    return register


def ordered_passes() -> list[Pass]:
    """The registered passes by stage, each after those it names. Raises ValueError on a cycle or an unknown name."""
    done: list[Pass] = []
    waiting = sorted(_passes.values(), key=lambda p: (p.stage, p.name))
    while waiting:
        ready = next((p for p in waiting if all(a in [d.name for d in done] for a in p.after)), None)
        if ready is None or any(w.stage < ready.stage for w in waiting):
            raise ValueError(f"passes cannot be ordered: {', '.join(f'{p.name} after {p.after}' for p in waiting)}")
        done.append(ready)
        waiting.remove(ready)
    return done
