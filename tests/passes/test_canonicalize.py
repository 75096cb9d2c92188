"""canonicalize: each rewrite on a minimal graph, its near miss, and equal results before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, target_name, verify
from graphllm.ir.graph_form import digest, to_json
from graphllm.ir.registry import load_ops
from graphllm.passes.canonicalize import canonicalize
from graphllm.rewrite import PassReport, Unit
from graphllm.weights.plan.plan import WeightPlan

dense = TensorSpec.contiguous
OPS = load_ops()
CONFIG = CompileConfig(Target("cpu", ()))
Fn = Callable[[dict[str, Any]], tuple[Tensor, ...]]


def _unit(fn: Fn, **inputs: TensorSpec) -> Unit:
    return trace_unit("test", inputs or {"x": dense("float32", "T", 12)}, fn, Shapes("cpu"))


def _run(unit: Unit) -> PassReport:
    report = canonicalize(unit, WeightPlan(()), CONFIG)
    verify(unit.graph, "after")
    return report


def _targets(unit: Unit) -> list[str]:
    return [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]


def _form(unit: Unit) -> str:
    output = unit.graph.output_node()
    output.meta["val"] = tuple(n.meta["val"] for n in output.args[0])
    return digest(to_json(unit.graph, unit.shapes))


def test_token_dimension_of_a_view() -> None:
    """The traced size is a node of its own, so equal views of different values would look different."""
    unit = _unit(lambda v: (v["x"].view(v["x"].shape[0], 3, 4),))
    assert _targets(unit) == ["aten::sym_size.int", "aten::view.default"]
    report = _run(unit)
    (view,) = (n for n in unit.graph.nodes if n.op == "call_function")
    assert view.args[1] == [-1, 3, 4]
    assert (report.changed, report.plan) == (1, None)
    assert "size as -1" in report.notes[0]


def test_near_miss_view_with_two_symbolic_sizes() -> None:
    """Only one size can be inferred, so both stay."""
    unit = _unit(
        lambda v: (v["x"].view(v["x"].shape[0], v["y"].shape[0], -1),),
        x=dense("float32", "T", 60),
        y=dense("float32", "S"),
    )
    before = _form(unit)
    assert _run(unit).changed == 0
    assert _form(unit) == before


def test_identity_view() -> None:
    unit = _unit(lambda v: (v["x"].view(-1, 12) + 1, v["x"].view(-1, 4) + 1))
    assert _run(unit).changed == 1
    assert _targets(unit) == ["aten::add.Tensor", "aten::view.default", "aten::add.Tensor"]


def test_near_miss_view_of_equal_element_count() -> None:
    unit = _unit(lambda v: (v["x"].view(-1, 6),))
    assert _run(unit).changed == 0
    assert _targets(unit) == ["aten::view.default"]


def test_equal_calls_are_merged() -> None:
    unit = _unit(lambda v: (OPS["swiglu"](v["x"]) + OPS["swiglu"](v["x"]),))
    assert _run(unit).changed == 1
    assert _targets(unit) == ["graphllm::swiglu", "aten::add.Tensor"]


def test_merging_follows_through() -> None:
    """Calls that become equal because their arguments did are merged too."""
    unit = _unit(lambda v: ((v["x"] + 1) * 2, (v["x"] + 1) * 2))
    assert _run(unit).changed == 2
    assert _targets(unit) == ["aten::add.Tensor", "aten::mul.Tensor"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda v: (v["x"] + 1, v["x"] + 2),
        lambda v: (v["x"] + 1, v["x"] + 1.0),  # not the same constant for integer tensors
        lambda v: (v["x"].sum(0), v["x"].sum(0, keepdim=True)),
        lambda v: (v["x"] + v["x"], v["x"] * v["x"]),
    ],
)
def test_near_misses_of_equal_calls(fn: Fn) -> None:
    unit = _unit(fn)
    assert _run(unit).changed == 0
    assert len(_targets(unit)) == 2


def test_near_miss_calls_that_write() -> None:
    """Attention over the same arguments twice writes the cache twice: neither call may go, nor a read between them."""
    attn = {"table": dense("int32", "S", 4), "start": dense("int32", "S + 1"), "len": dense("int32", "S")}
    inputs = {"q": dense("float32", "T", 4, 16), "kv": dense("float32", 64, 2, 4, 8, 16), **attn}

    def twice(v: dict[str, Any]) -> tuple[Tensor, ...]:
        return tuple(OPS["paged_attention"](v["q"], v["q"], v["q"], v["kv"], *(v[n] for n in attn), 0.25) for _ in "ab")

    unit = _unit(twice, **inputs)
    assert _run(unit).changed == 0
    assert _targets(unit) == ["graphllm::paged_attention"] * 2


def test_near_miss_reads_around_a_write() -> None:
    """The same call before and after its argument was written gives different results."""
    attn = {"table": dense("int32", "S", 4), "start": dense("int32", "S + 1"), "len": dense("int32", "S")}
    inputs = {"q": dense("float32", "T", 4, 16), "kv": dense("float32", 64, 2, 4, 8, 16), **attn}

    def fn(v: dict[str, Any]) -> tuple[Tensor, ...]:
        before = v["kv"].sum()
        out = OPS["paged_attention"](v["q"], v["q"], v["q"], v["kv"], *(v[n] for n in attn), 0.25)
        return before, out, v["kv"].sum()

    unit = _unit(fn, **inputs)
    assert _run(unit).changed == 0
    assert _targets(unit) == ["aten::sum.default", "graphllm::paged_attention", "aten::sum.default"]


def test_inputs_stay() -> None:
    """A unit's inputs are named in order, so a pass may not drop one that nobody reads."""
    unit = _unit(
        lambda v: (v["x"] + v["y"].view(-1, 12) * 0,), x=dense("float32", "T", 12), y=dense("float32", "T", 12)
    )
    _run(unit)
    assert len(unit.graph.find_nodes(op="placeholder")) == len(unit.inputs) == 2


def test_results_are_bitwise_equal_and_a_second_run_changes_nothing() -> None:
    def fn(v: dict[str, Any]) -> tuple[Tensor, ...]:
        x = v["x"].view(v["x"].shape[0], 12)
        heads = x.view(x.shape[0], 3, 4)
        a, b = OPS["swiglu"](x), OPS["swiglu"](v["x"])
        return heads.flatten(1) * 2, (a + b).reshape(-1, 6), torch.softmax(heads, -1) - torch.softmax(heads, -1)

    unit = _unit(fn)
    assert _run(unit).changed > 3
    settled = _form(unit)
    assert _run(unit).changed == 0
    assert _form(unit) == settled
    for T in (1, 2, 7):
        x = torch.randn(T, 12)
        found = torch.fx.GraphModule(torch.nn.Module(), unit.graph)(x)
        assert all(torch.equal(got, want) for got, want in zip(found, fn({"x": x}), strict=True))
