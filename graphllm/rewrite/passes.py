"""The contract of a pass: one function over a graph and the weight plan, with a report; and the registry of passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from graphllm.config import CompileConfig
from graphllm.ir.graph import eliminate_dead, verify
from graphllm.program.specs import InputSpec, StateSpec
from graphllm.rewrite.unit import Unit
from graphllm.weights.plan.plan import WeightPlan

Numerics = Literal["bitwise", "reorders", "changes"]


class PassReport(NamedTuple):
    """What a pass did: how many places it changed and, for people, what they were. plan: the edited plan, if it was.
    states, inputs: that the unit reads since, as "state.<name>" and "step.<name>"; of a layer, each such layer has
    states of its own."""

    changed: int
    notes: tuple[str, ...] = ()
    plan: WeightPlan | None = None
    states: tuple[StateSpec, ...] = ()
    inputs: tuple[InputSpec, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A registered pass; call it to run it on a unit.

    numerics: "bitwise" leaves every result as it was, "reorders" changes rounding only, "changes" alters the
    computation (quantization). after: the pass after which it runs; empty for passes that the pipeline lists.
    """

    name: str
    numerics: Numerics
    after: str
    run: Callable[[Unit, WeightPlan, CompileConfig], PassReport]

    def __call__(self, unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
        """Run on a unit, verify, and drop what nothing reads any more. Raises GraphError for what a pass left wrong."""
        report = self.run(unit, plan, config)
        verify(unit.graph, f"{unit.name} after {self.name}")
        eliminate_dead(unit.graph, keep_inputs=True)
        return report

    def apply(self, unit: Unit, plan: WeightPlan, config: CompileConfig) -> tuple[PassReport, dict[str, Any]]:
        """Run on a unit: the report, and what the manifest says of it."""
        start = time.perf_counter()
        report = self(unit, plan, config)
        milliseconds = round(1e3 * (time.perf_counter() - start), 2)
        return report, {
            "pass": self.name, "numerics": self.numerics, "unit": unit.name, "changed": report.changed,
            "notes": list(report.notes), "ms": milliseconds,
        }  # fmt: skip


_passes: dict[str, Pass] = {}


def register_pass(
    *, numerics: Numerics, after: str = ""
) -> Callable[[Callable[[Unit, WeightPlan, CompileConfig], PassReport]], Pass]:
    """Make a pass known. It edits ``unit.graph`` in place and reads nothing else than its arguments.

    after: for a pass that the pipeline does not list, such as a plugin's: the name of the pass after which it runs.
    Raises ValueError when the name is taken.
    """

    def register(fn: Callable[[Unit, WeightPlan, CompileConfig], PassReport]) -> Pass:
        if fn.__name__ in _passes:
            raise ValueError(f"a pass named {fn.__name__!r} is already registered; choose another name")
        _passes[fn.__name__] = Pass(fn.__name__, numerics, after, fn)
        return _passes[fn.__name__]

    return register


def registered_passes() -> dict[str, Pass]:
    """The passes registered so far, by name. `graphllm.ir.registry.load_passes` imports them all."""
    return dict(_passes)
