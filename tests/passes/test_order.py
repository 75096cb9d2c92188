"""The order of passes: the literal list, where plugins' passes go in it, reports and verification."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphllm.compile.passes import PIPELINE, with_plugins
from graphllm.compile.pipeline import run_passes
from graphllm.compile.trace import trace_unit
from graphllm.config import CompileConfig, ConfigError, Target
from graphllm.ir.graph import GraphError, Shapes, TensorSpec
from graphllm.ir.registry import load_passes
from graphllm.rewrite import Pass, PassReport, Unit, register_pass, registered_passes
from graphllm.weights.plan.expr import Values
from graphllm.weights.plan.plan import Entry, WeightPlan

CONFIG = CompileConfig(Target("cpu", ()))


def _pass(name: str, after: str = "", fn: Any = None) -> Pass:
    return Pass(name, "bitwise", after, fn or (lambda unit, plan, config: PassReport(0)))


LISTED = PIPELINE._replace(units=(_pass("first"), _pass("second")), pieces=(_pass("third"),))


def _order(*passes: Pass) -> list[list[str]]:
    known = {p.name: p for p in (*LISTED.units, *LISTED.pieces, *passes)}
    found = with_plugins(LISTED, known)
    return [[p.name for p in part] for part in (found.units, found.pieces)]


def test_every_pass_of_this_tree_is_listed() -> None:
    load_passes()
    assert {p.name: p for part in (PIPELINE.units, PIPELINE.pieces) for p in part} == registered_passes()


def test_plugins_have_their_places() -> None:
    assert _order() == [["first", "second"], ["third"]]
    assert _order(_pass("zeta", "first"), _pass("alpha", "first"), _pass("late", "third"), _pass("next", "zeta")) == [
        ["first", "alpha", "zeta", "next", "second"], ["third", "late"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "table",
    [{"a": "b", "b": "a"}, {"a": "a"}, {"a": "missing"}, {"a": ""}],
    ids=["cycle", "itself", "unknown", "none"],
)
def test_what_cannot_be_ordered(table: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"pass a: after is '.*'; name the pass .*: first, second, third"):
        _order(*(_pass(name, after) for name, after in table.items()))


def test_names_are_unique() -> None:
    def canonicalize(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
        return PassReport(0)

    with pytest.raises(ValueError, match="'canonicalize' is already registered"):
        register_pass(numerics="bitwise")(canonicalize)


def _unit() -> Unit:
    spec = TensorSpec.contiguous("float32", "T", 4)
    return trace_unit("unit", {"x": spec}, lambda v: (v["x"] + 1,), Shapes("cpu"))


def test_runner_reports_and_hands_the_plan_on() -> None:
    seen = []
    added = WeightPlan((Entry("new", (1,), "float32", Values((1.0,), (1,))),))

    def adds(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
        return PassReport(2, ("did this", "and that"), added)

    def sees(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
        seen.append((plan, config))
        return PassReport(0)

    done = run_passes([_unit()], WeightPlan(()), CONFIG, [_pass("adds", fn=adds), _pass("sees", fn=sees)])
    assert seen == [(added, CONFIG)]
    assert done.plan == added
    first, second = done.reports
    assert {k: first[k] for k in ("pass", "numerics", "unit", "changed", "notes")} == {
        "pass": "adds", "numerics": "bitwise", "unit": "unit", "changed": 2,
        "notes": ["did this", "and that"],
    }  # fmt: skip
    assert second["changed"] == 0
    assert first["ms"] >= 0
    assert list(done.texts) == ["00-trace.unit.txt", "01-adds.unit.txt", "02-sees.unit.txt"]
    assert done.texts["01-adds.unit.txt"].startswith("# unit unit after adds\ninput %arg0_1 (x): float32[T, 4]\n")


def test_runner_names_the_pass_that_broke_the_graph() -> None:
    def breaks(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
        node = next(n for n in unit.graph.nodes if n.op == "call_function")
        node.target = torch.tanh
        return PassReport(1)

    with pytest.raises(GraphError, match=r"unit after breaks: node add: .* is no IR target"):
        run_passes([_unit()], WeightPlan(()), CONFIG, [_pass("breaks", fn=breaks)])

    def forgets(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
        node = next(n for n in unit.graph.nodes if n.op == "call_function")
        with unit.graph.inserting_after(node):
            unit.graph.call_function(torch.ops.aten.neg.default, (node,))
        return PassReport(1)

    with pytest.raises(GraphError, match="unit after forgets: node neg_default has no fake value"):
        run_passes([_unit()], WeightPlan(()), CONFIG, [_pass("forgets", fn=forgets)])
