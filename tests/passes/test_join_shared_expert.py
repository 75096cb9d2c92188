"""join_shared_expert: the shared expert becomes one of the others where both are plain and as wide; results stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead, target_name, verify
from graphllm.ir.registry import load_ops
from graphllm.passes.join_shared_expert import join_shared_expert
from graphllm.weights.plan.evaluate import evaluate
from graphllm.weights.plan.expr import Read
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.simplify import simplify
from tests.weights.test_expr import fetch_from

OPS = load_ops()
CONFIG = CompileConfig(Target("cpu", ("x86_64",)))
dense = TensorSpec.contiguous
D, F, N, K, T = 16, 24, 8, 2, 5


def _specs(width: int) -> dict[str, TensorSpec]:
    return {
        "x": dense("float32", "T", D), "w.router": dense("float32", N + 1, D),
        "w.gate_up": dense("float32", N, 2 * F, D), "w.down": dense("float32", N, D, F),
        "w.shared_gate_up": dense("float32", 2 * width, D), "w.shared_down": dense("float32", D, width),
    }  # fmt: skip


def _layer(v: dict[str, Any]) -> tuple[Tensor, ...]:
    logits, share = OPS["linear"](v["x"], v["w.router"]).split((N, 1), 1)
    out = OPS["fused_moe"](v["x"], v["w.gate_up"], v["w.down"], *OPS["moe_route"](logits, K))
    shared = OPS["linear"](OPS["swiglu"](OPS["linear"](v["x"], v["w.shared_gate_up"])), v["w.shared_down"])
    return (out + torch.sigmoid(share) * shared,)


def _ungated(v: dict[str, Any]) -> tuple[Tensor, ...]:
    """What all tokens share counts as it is."""
    logits = OPS["linear"](v["x"], v["w.router"])[:, :N]
    out = OPS["fused_moe"](v["x"], v["w.gate_up"], v["w.down"], *OPS["moe_route"](logits, K, scale=2.5))
    shared = OPS["linear"](OPS["swiglu"](OPS["linear"](v["x"], v["w.shared_gate_up"])), v["w.shared_down"])
    return (out + shared,)


def _late(v: dict[str, Any]) -> tuple[Tensor, ...]:
    """The shared expert's share is known only after the experts are chosen."""
    logits, _ = OPS["linear"](v["x"], v["w.router"]).split((N, 1), 1)
    out = OPS["fused_moe"](v["x"], v["w.gate_up"], v["w.down"], *OPS["moe_route"](logits, K))
    shared = OPS["linear"](OPS["swiglu"](OPS["linear"](v["x"], v["w.shared_gate_up"])), v["w.shared_down"])
    return (out + torch.sigmoid(v["x"][:, :1]) * shared,)


@pytest.mark.parametrize(
    ("fn", "width", "config", "joins"),
    [
        (_layer, F, CONFIG, 1),
        (_ungated, F, CONFIG, 1),
        (_ungated, 3 * F, CONFIG, 3),
        (_ungated, F + 8, CONFIG, 0),
        (_ungated, F // 2, CONFIG, 0),
        (_layer, 2 * F, CONFIG, 0),
        (_late, F, CONFIG, 0),
        (_layer, F, replace(CONFIG, tensor_parallel_size=2), 0),
        (_layer, F, replace(CONFIG, count_expert_tokens=True), 0),
    ],
)
def test_what_joins(fn: Any, width: int, config: CompileConfig, joins: int) -> None:
    """joins: experts that are added."""
    specs = _specs(width)
    unit = trace_unit("layer.sparse", specs, fn, Shapes("cpu"))._replace(layers=(0, 3))
    entries = tuple(
        Entry(f"layers.{i}.{label[2:]}", spec.shape, "float32", Read((f"{i}.{label}",), spec.shape))
        for i in unit.layers for label, spec in specs.items() if label != "x"
    )  # fmt: skip
    report = join_shared_expert(unit, WeightPlan(entries), config)
    verify(unit.graph, "after")
    eliminate_dead(unit.graph)
    names = [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]
    called = [n.split("::")[1].split(".")[0] for n in names if "graphllm::" in n]
    everything = ["linear", "moe_route", "fused_moe", "linear", "swiglu", "linear"]
    assert sorted(called) == sorted(everything[:3] if joins else everything)
    assert report.changed == (joins > 0)
    draw = torch.Generator().manual_seed(0)
    values = {n: torch.randn([T if d == "T" else d for d in s.shape], generator=draw) for n, s in specs.items()}
    (right,) = fn(values)
    if joins:
        assert report.plan is not None
        assert {e.name: e.shape for e in report.plan} == {
            f"layers.{i}.{name}": shape
            for i in (0, 3)
            for name, shape in (
                ("router", (N + 1, D)), ("gate_up.joined", (N + joins, 2 * F, D)),
                ("down.joined", (N + joins, D, F)),
            )
        }  # fmt: skip
        fetch = fetch_from({f"0.{label}": tensor for label, tensor in values.items()})
        for stack in ("gate_up.joined", "down.joined"):
            values[f"w.{stack}"] = evaluate(simplify(report.plan[f"layers.0.{stack}"].expr), fetch)
    arguments = [values[n.meta["label"]] for n in unit.graph.find_nodes(op="placeholder")]
    (found,) = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), unit.graph)).run(*arguments)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-5)
