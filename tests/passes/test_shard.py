"""shard: what stands after the ops that read divided weights, and which sums become one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead, target_name, verify
from graphllm.ir.registry import load_ops
from graphllm.ir.weight import Weight
from graphllm.passes.shard import shard
from graphllm.rewrite import PassReport, Unit
from graphllm.weights.plan.shard import shard_plan
from tests.weights.fakes import plan_of

OPS = load_ops()
linear = OPS["linear"]
dense = TensorSpec.contiguous
D, F = 8, 12
WEIGHTS = {
    "down": Weight((D, F), ("down",), shard="input"),
    "down_bias": Weight((D,), ("bias",)),
    "shared": Weight((D, F), ("shared",), shard="input"),
    "gate": Weight((1, D), ("gate",)),
    "head": Weight((11, D), ("head",), shard="vocab"),
}


def _run(fn: Any, ranks: int = 2) -> tuple[Unit, PassReport, list[str]]:
    """The pass over a unit that reads x, h (divided) and the weights, which the trace knows whole."""
    plan = shard_plan(plan_of(WEIGHTS), ranks)
    shapes = {n: (*w.shape[:-1], w.shape[-1] // ranks) if w.shard == "input" else w.shape for n, w in WEIGHTS.items()}
    specs = {"x": dense("float32", "T", D), "h": dense("float32", "T", F // ranks)}
    specs |= {f"w.{n}": dense("float32", *shape) for n, shape in shapes.items()}
    unit = trace_unit("embed", specs, fn, Shapes("cpu"))
    config = CompileConfig(Target("cpu", ()), tensor_parallel_size=ranks)
    report = shard(unit, plan, config)
    verify(unit.graph, "after")
    eliminate_dead(unit.graph)
    return unit, report, [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]


def test_the_residual_is_added_to_the_sum() -> None:
    def fn(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (v["x"] + linear(v["h"], v["w.down"], v["w.down_bias"]),)

    _, report, targets = _run(fn)
    assert targets == ["graphllm::linear", "graphllm::all_reduce", "aten::add.Tensor"]
    assert report.notes == ("down: all_reduce",)
    assert report.plan is not None
    assert str(report.plan["embed.down_bias"].expr) == "slice(pad(read bias [8], 0, 0, 8, 0.0), dim 0, 0:8 + 8 rank)"


def test_two_sums_that_are_added_become_one() -> None:
    def fn(v: dict[str, Tensor]) -> tuple[Tensor, ...]:
        gate = torch.sigmoid(linear(v["x"], v["w.gate"]))
        return (linear(v["h"], v["w.down"]) + gate * linear(v["h"], v["w.shared"]),)

    _, _, targets = _run(fn)
    assert targets.count("graphllm::all_reduce") == 1
    assert targets[-2:] == ["aten::add.Tensor", "graphllm::all_reduce"]


def test_logits_of_the_whole_vocabulary() -> None:
    unit, _, targets = _run(lambda v: (linear(v["x"], v["w.head"]),))
    assert targets == ["graphllm::linear", "graphllm::all_gather"]
    (gathered,) = unit.graph.output_node().args[0]  # type: ignore[misc,union-attr]
    assert gathered.meta["val"].shape[1] == 11  # type: ignore[union-attr]
    assert gathered.args[0].meta["val"].shape[1] == 6  # type: ignore[union-attr]


def test_a_bias_that_something_else_reads_cannot_be_kept_by_one_rank() -> None:
    with pytest.raises(ValueError, match="must be a weight that nothing else reads"):
        _run(lambda v: (linear(v["h"], v["w.down"], v["w.down_bias"]) + v["w.down_bias"],))
