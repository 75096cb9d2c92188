"""quantize_activations: steps of more than 16 rows take rows of float8; fewer keep theirs; the numbers stay near."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead, target_name, verify
from graphllm.ir.registry import load_ops
from graphllm.passes.fuse_linear import fuse_linear
from graphllm.passes.quantize_activations import quantize_activations
from graphllm.rewrite import Unit
from graphllm.weights.encodings import encoding_of
from graphllm.weights.plan.plan import WeightPlan

OPS = load_ops()
GPU = CompileConfig(Target("cuda", ("sm_90",)))
MANY, SOME, FEW = Bucket("mixed", 257, 2048), Bucket("decode", 33, 64), Bucket("decode", 2, 16)
dense = TensorSpec.contiguous
D, F = 128, 192
SPECS = {
    "x": dense("bfloat16", "T", D), "norm": dense("bfloat16", D), "up": dense("int16", 2 * F, D // 2),
    "up_scales": dense("float32", 1, 2 * F), "down": dense("int16", D, 128), "down_scales": dense("float32", 1, D),
}  # fmt: skip


def _layer(v: dict[str, Any]) -> tuple[Tensor, ...]:
    def linear(x: Tensor, name: str) -> Any:
        return OPS["linear"](x, v[name], None, v[f"{name}_scales"], None, "float8", 0)

    x = OPS["rms_norm"](v["x"], v["norm"], 1e-5, 0.0)
    return (v["x"] + linear(OPS["swiglu"](linear(x, "up")), "down"),)


def _run(bucket: Bucket, norm: str = "bfloat16") -> tuple[Unit, list[str]]:
    specs = SPECS | {"norm": dense(norm, D)}
    unit = trace_unit("piece", specs, _layer, Shapes("cpu", bucket))._replace(bucket=bucket)
    for step in (quantize_activations, fuse_linear):
        step(unit, WeightPlan(()), GPU)
        verify(unit.graph, "after")
    eliminate_dead(unit.graph)
    return unit, [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("bucket", [MANY, SOME])
def test_rows_are_rounded_with_the_norm_and_the_gate(bucket: Bucket) -> None:
    unit, targets = _run(bucket)
    calls = [t.removeprefix("graphllm::") for t in targets if t.startswith("graphllm::")]
    assert calls == ["quantize_rows", "scaled_linear", "quantize_rows", "scaled_linear"]
    draw = torch.Generator().manual_seed(0)
    float8 = encoding_of("float8-0")
    values: dict[str, Any] = {n: torch.randn(s, generator=draw).bfloat16() for n, s in (("x", (300, D)), ("norm", D))}
    for name, shape in (("up", (2 * F, D)), ("down", (D, F))):
        parts = float8.encoded(torch.randn(shape, generator=draw) * shape[1] ** -0.5)
        values |= {name: parts["values"], f"{name}_scales": parts["scales"]}
    given = [values[n.meta["label"]] for n in unit.graph.find_nodes(op="placeholder")]
    (found,) = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), unit.graph)).run(*given)
    operators = {t for t in targets if not t.startswith("graphllm::")} - {"getitem", "operator.getitem"}
    assert bucket is MANY or not operators, "the gate and the residual end the products"
    (exact,) = _layer(values)
    error = float((found - exact).float().norm() / (exact - values["x"]).float().norm())
    assert 0.005 < error < 0.06  # two roundings to four bits, at random


def test_with_a_norm_in_float32() -> None:
    _, targets = _run(SOME, "float32")
    assert [t for t in targets if "::" in t] == ["graphllm::quantize_rows", "graphllm::scaled_linear"] * 2


def test_few_rows_keep_theirs() -> None:
    _, targets = _run(FEW)
    assert targets == ["graphllm::fused_linear", "graphllm::fused_linear"]
