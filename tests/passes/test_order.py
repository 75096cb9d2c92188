"""The registry of passes: order by stage and `after`, errors for what cannot be ordered, reports and verification."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphllm.compile import passes
from graphllm.compile.passes import PassReport, Stage, Unit, ordered_passes, register_pass
from graphllm.compile.pipeline import run_passes
from graphllm.compile.trace import trace_unit
from graphllm.config import CompileConfig, Target
from graphllm.ir.graph import GraphError, Shapes, TensorSpec
from graphllm.weights.expr import Values
from graphllm.weights.plan import Entry, WeightPlan

CONFIG = CompileConfig(Target("cpu", ()))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An empty registry for the test."""
    empty: dict[str, Any] = {}
    monkeypatch.setattr(passes, "_passes", empty)
    return empty


def _register(name: str, stage: Stage, after: tuple[str, ...] = (), fn: Any = None) -> None:
    body = fn or (lambda unit, plan, config: PassReport(0))
    body.__name__ = name
    register_pass(stage=stage, numerics="bitwise", after=after)(body)


def test_order() -> None:
    _register("zeta", Stage.CANONICALIZE)
    _register("fuse_b", Stage.FUSE, after=("fuse_c",))
    _register("fuse_a", Stage.FUSE, after=("fuse_b", "zeta"))
    _register("fuse_c", Stage.FUSE)
    _register("quantize", Stage.QUANTIZE)
    _register("alpha", Stage.CANONICALIZE)
    assert [p.name for p in ordered_passes()] == ["alpha", "zeta", "quantize", "fuse_c", "fuse_b", "fuse_a"]


@pytest.mark.parametrize(
    "table",
    [
        {"a": (Stage.FUSE, ("b",)), "b": (Stage.FUSE, ("a",))},
        {"a": (Stage.FUSE, ("a",))},
        {"a": (Stage.FUSE, ("missing",))},
        {"a": (Stage.CANONICALIZE, ("b",)), "b": (Stage.FUSE, ())},
    ],
    ids=["cycle", "itself", "unknown", "later stage"],
)
def test_what_cannot_be_ordered(table: dict[str, Any]) -> None:
    for name, (stage, after) in table.items():
        _register(name, stage, after)
    with pytest.raises(ValueError, match=r"passes cannot be ordered: .*a after \('"):
        ordered_passes()


def test_names_are_unique() -> None:
    _register("a", Stage.FUSE)
    with pytest.raises(ValueError, match="'a' is already registered"):
        _register("a", Stage.LORA)


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

    _register("adds", Stage.QUANTIZE, fn=adds)
    _register("sees", Stage.FUSE, fn=sees)
    done = run_passes([_unit()], WeightPlan(()), CONFIG)
    assert seen == [(added, CONFIG)]
    assert done.plan == added
    first, second = done.reports
    assert {k: first[k] for k in ("pass", "stage", "numerics", "unit", "changed", "notes")} == {
        "pass": "adds", "stage": "QUANTIZE", "numerics": "bitwise", "unit": "unit", "changed": 2,
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

    _register("breaks", Stage.FUSE, fn=breaks)
    with pytest.raises(GraphError, match=r"unit after breaks: node add: .* is no IR target"):
        run_passes([_unit()], WeightPlan(()), CONFIG)

    def forgets(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
        node = next(n for n in unit.graph.nodes if n.op == "call_function")
        with unit.graph.inserting_after(node):
            unit.graph.call_function(torch.ops.aten.neg.default, (node,))
        return PassReport(1)

    passes._passes.clear()
    _register("forgets", Stage.FUSE, fn=forgets)
    with pytest.raises(GraphError, match="unit after forgets: node neg_default has no fake value"):
        run_passes([_unit()], WeightPlan(()), CONFIG)
