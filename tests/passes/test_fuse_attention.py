"""fuse_attention: rotation and norms move into attention, unless something else reads them or they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, target_name, verify
from graphllm.ir.registry import load_ops
from graphllm.passes.fuse_attention import fuse_attention
from graphllm.rewrite import PassReport, Unit
from graphllm.weights.plan.plan import WeightPlan

OPS = load_ops()
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 2, 16), Bucket("mixed", 2, 64))
GPU = CompileConfig(Target("cuda", ("sm_90",)), buckets=BUCKETS)
dense = TensorSpec.contiguous
E, F, PAGE = 8, 4, 16
SPECS = {
    "q": dense("float32", "T", 4, E), "k": dense("float32", "T", 2, E), "v": dense("float32", "T", 2, E),
    "kv": dense("float32", 6, 2, 2, PAGE, E), "table": dense("int32", "S", 2), "start": dense("int32", "S + 1"),
    "length": dense("int32", "S"), "cos": dense("float32", "T", F), "sin": dense("float32", "T", F),
    "qn": dense("float32", E), "kn": dense("float32", E),
}  # fmt: skip
Values = dict[str, Any]


def _attend(v: Values, q: Any, k: Any) -> Any:
    return OPS["paged_attention"](q, k, v["v"], v["kv"], v["table"], v["start"], v["length"], 0.5, window=20)


def _rope(v: Values, x: Any) -> Any:
    return OPS["rope"](x, v["cos"], v["sin"])


def _norm(x: Any, weight: Any, offset: float = 0.0) -> Any:
    return OPS["rms_norm"](x, weight, 1e-5, offset)


def _both(v: Values) -> tuple[Tensor, ...]:
    return (_attend(v, _rope(v, _norm(v["q"], v["qn"])), _rope(v, _norm(v["k"], v["kn"]))),)


def _run(fn: Callable[[Values], tuple[Tensor, ...]], config: CompileConfig = GPU) -> tuple[Unit, PassReport, list[str]]:
    unit = trace_unit("layer.full", SPECS, fn, Shapes("cpu"))
    report = fuse_attention(unit, WeightPlan(()), config)
    verify(unit.graph, "after")
    return unit, report, [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]


def _values() -> Values:
    draw = torch.Generator().manual_seed(0)
    sizes = {"T": 5, "S": 2}
    made = {n: torch.randn([sizes.get(str(d), d) for d in s.shape if d != "S + 1"] or [3], generator=draw)
            for n, s in SPECS.items()}  # fmt: skip
    return made | {
        "table": torch.tensor([[1, 2], [4, 5]], dtype=torch.int32),
        "start": torch.tensor([0, 4, 5], dtype=torch.int32),
        "length": torch.tensor([19, 7], dtype=torch.int32),
    }


@pytest.mark.parametrize("norm", [True, False])
def test_it_is_one_op_with_the_same_result(norm: bool) -> None:
    def plain(v: Values) -> tuple[Tensor, ...]:
        return (_attend(v, _rope(v, v["q"]), _rope(v, v["k"])),)

    fn = _both if norm else plain
    unit, report, targets = _run(fn)
    assert targets == ["graphllm::paged_attention"]
    assert report.changed == 1
    assert ("norm" in report.notes[0]) == norm
    values, expected_values = _values(), _values()
    arguments = [values[n.meta["label"]] for n in unit.graph.find_nodes(op="placeholder")]
    (out,) = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), unit.graph)).run(*arguments)
    torch.testing.assert_close(out, fn(expected_values)[0])
    assert torch.equal(values["kv"], expected_values["kv"])


def test_arguments_are_kept() -> None:
    unit, _, _ = _run(_both)
    (node,) = (n for n in unit.graph.nodes if n.op == "call_function")
    assert (node.kwargs["window"], node.kwargs["scale"], node.kwargs["eps"]) == (20, 0.5, 1e-5)
    assert node.kwargs["q_norm_E"].meta["label"] == "qn"
    assert node.kwargs["k_norm_E"].meta["label"] == "kn"


@pytest.mark.parametrize(
    "fn",
    [
        lambda v: (_attend(v, v["q"], v["k"]),),
        lambda v: (_attend(v, _rope(v, v["q"]), v["k"]),),
        lambda v: (_attend(v, _rope(v, v["q"]), OPS["rope"](v["k"], v["sin"], v["cos"])),),
        lambda v: (_attend(v, (q := _rope(v, v["q"])), _rope(v, v["k"])), q),
    ],
    ids=["no rotation", "only queries", "other tables", "read elsewhere"],
)
def test_near_misses(fn: Callable[[Values], tuple[Tensor, ...]]) -> None:
    _, report, targets = _run(fn)
    assert report.changed == 0
    assert "graphllm::paged_attention" in targets


@pytest.mark.parametrize(
    "fn",
    [
        lambda v: (_attend(v, _rope(v, _norm(v["q"], v["qn"], 1.0)), _rope(v, _norm(v["k"], v["kn"], 1.0))),),
        lambda v: (_attend(v, _rope(v, _norm(v["q"], v["qn"])), _rope(v, v["k"])),),
    ],
    ids=["Gemma's norm", "only queries normalized"],
)
def test_norms_that_stay(fn: Callable[[Values], tuple[Tensor, ...]]) -> None:
    unit, report, targets = _run(fn)
    assert report.changed == 1
    assert "graphllm::rms_norm" in targets
    calls = [n for n in unit.graph.nodes if n.op == "call_function"]
    (node,) = (n for n in calls if target_name(n.target) == "graphllm::paged_attention")
    assert node.kwargs["q_norm_E"] is None


@pytest.mark.parametrize(
    "config", [CompileConfig(Target("cpu", ()), buckets=BUCKETS), dataclasses.replace(GPU, backend="eager")]
)
def test_other_targets_are_left_alone(config: CompileConfig) -> None:
    assert _run(_both, config)[1].changed == 0
