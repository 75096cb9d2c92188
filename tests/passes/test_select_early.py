"""select_early: the rows that are sampled from are taken before what is computed row by row; near misses stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead, target_name, verify
from graphllm.ir.model import select_rows
from graphllm.ir.registry import load_ops
from graphllm.passes.select_early import select_early
from graphllm.rewrite import PassReport, Unit
from graphllm.weights.plan.plan import WeightPlan

OPS = load_ops()
CONFIG = CompileConfig(Target("cpu", ()))
MANY, DECODE, FIXED = Bucket("mixed", 2, 512), Bucket("decode", 2, 16), Bucket("mixed", 64, 64)
dense = TensorSpec.contiguous
D, F, V = 16, 24, 40
SPECS = {
    "a": dense("float32", "T", 2, D // 2), "x": dense("float32", "T", D), "rows": dense("int32", "S"),
    "norm": dense("float32", D), "square": dense("float32", D, D), "up": dense("float32", 2 * F, D),
    "down": dense("float32", D, F), "head": dense("float32", V, D),
}  # fmt: skip
Values = dict[str, Any]
Fn = Callable[[Values], tuple[Tensor, ...]]
linear, swiglu = OPS["linear"], OPS["swiglu"]


def _norm(v: Values, x: Any) -> Any:
    return OPS["rms_norm"](x, v["norm"], 1e-5)


def _last_piece(v: Values) -> tuple[Tensor, ...]:
    """From the last attention to the logits."""
    x = v["x"] + linear(v["a"].view(-1, D), v["square"])
    x = x + linear(swiglu(linear(_norm(v, x), v["up"])), v["down"])
    return (linear(_norm(v, select_rows(x, v["rows"])), v["head"]),)


def _run(fn: Fn, bucket: Bucket | None) -> tuple[Unit, PassReport]:
    unit = trace_unit("piece", SPECS, fn, Shapes("cpu", bucket))._replace(bucket=bucket)
    report = select_early(unit, WeightPlan(()), CONFIG)
    verify(unit.graph, "after")
    eliminate_dead(unit.graph)
    return unit, report


def _calls(unit: Unit) -> list[tuple[str, Any]]:
    """Every call in order, with the number of rows that it makes."""
    calls = [n for n in unit.graph.nodes if n.op == "call_function"]
    return [(target_name(n.target), unit.shapes.dim(n.meta["val"].shape[0])) for n in calls]


def _check(fn: Fn, unit: Unit) -> None:
    """The same results as before; and what the graph says of its values is what they are."""
    draw = torch.Generator().manual_seed(0)
    values: Values = {
        n: torch.randn([7 if d == "T" else d for d in s.shape], generator=draw) for n, s in SPECS.items() if n != "rows"
    }
    values["rows"] = torch.tensor([6, 0, 3], dtype=torch.int32)

    class Checked(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            found = super().run_node(n)
            if isinstance(found, Tensor):
                sizes = {"T": 7, "S": 3}
                said = [sizes.get(str(d), d) for d in map(unit.shapes.dim, n.meta["val"].shape)]
                assert list(found.shape) == said, n.name
            return found

    arguments = [values[n.meta["label"]] for n in unit.graph.find_nodes(op="placeholder")]
    outputs = Checked(torch.fx.GraphModule(torch.nn.Module(), unit.graph)).run(*arguments)
    for found, expected in zip(outputs, fn(values), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_all_that_is_row_by_row_comes_after() -> None:
    unit, report = _run(_last_piece, MANY)
    assert report.changed == 1
    assert [target for target, _ in _calls(unit)].count("aten::index_select.default") == 2  # attention and residual
    assert {rows for _, rows in _calls(unit)} == {"S"}
    _check(_last_piece, unit)


@pytest.mark.parametrize(
    "fn",
    [
        lambda v: (select_rows(v["x"], v["rows"]),),
        lambda v: (y := linear(v["x"], v["square"]), select_rows(y, v["rows"])),
        lambda v: (select_rows(v["x"].cumsum(0), v["rows"]),),
        lambda v: (select_rows(linear(v["x"], v["square"]), v["rows"] // 2),),
        lambda v: (torch.index_select(linear(v["x"], v["square"]), 1, v["rows"]),),
        lambda v: (select_rows(linear(v["square"], v["square"]), v["rows"]),),
    ],
    ids=["an input", "all rows are a result", "sums over tokens", "computed rows", "columns", "no tokens"],
)
def test_near_misses(fn: Fn) -> None:
    unit, report = _run(fn, MANY)
    assert report.changed == 0
    _check(fn, unit)


def test_stops_at_what_is_read_elsewhere() -> None:
    def fn(v: Values) -> tuple[Tensor, ...]:
        x = linear(v["x"], v["square"])
        return x, select_rows(x + _norm(v, x), v["rows"])

    unit, report = _run(fn, MANY)
    assert report.changed == 1
    assert [rows for _, rows in _calls(unit)] == ["T", "S", "S", "S"]
    _check(fn, unit)


@pytest.mark.parametrize("bucket", [None, DECODE, FIXED])
def test_other_steps_are_left_alone(bucket: Bucket | None) -> None:
    assert _run(_last_piece, bucket)[1].changed == 0
