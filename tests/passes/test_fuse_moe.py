"""fuse_moe: experts take in the sum after them and, for one token, the norm before them; results are the same."""

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
from graphllm.passes.fuse_moe import fuse_moe
from graphllm.weights.plan.plan import WeightPlan

OPS = load_ops()
GPU, CPU = CompileConfig(Target("cuda", ("sm_90", "sms_132"))), CompileConfig(Target("cpu", ("x86_64",)))
ONE, FEW, MANY = Bucket("decode", 1, 1), Bucket("decode", 2, 16), Bucket("mixed", 2, 512)
dense = TensorSpec.contiguous
D, F, N, K = 16, 24, 8, 2
SPECS = {
    "x": dense("bfloat16", "T", D), "r": dense("bfloat16", "T", D), "norm": dense("bfloat16", D),
    "router": dense("bfloat16", N, D), "up": dense("bfloat16", N, 2 * F, D), "down": dense("bfloat16", N, D, F),
}  # fmt: skip


def _layer(v: dict[str, Any]) -> tuple[Tensor, ...]:
    h = OPS["rms_norm"](v["x"], v["norm"], 1e-5)
    weights, experts = OPS["moe_route"](OPS["linear"](h, v["router"]), K)
    return (v["r"] + OPS["fused_moe"](h, v["up"], v["down"], weights, experts),)


def _read_twice(v: dict[str, Any]) -> tuple[Tensor, ...]:
    weights, experts = OPS["moe_route"](OPS["linear"](v["x"], v["router"]), K)
    out = OPS["fused_moe"](v["x"], v["up"], v["down"], weights, experts)
    return v["r"] + out, out


@pytest.mark.parametrize(
    ("fn", "bucket", "config", "expected"),
    [
        (_layer, ONE, GPU, ["fused_linear", "moe_route", "fused_moe"]),
        (_layer, FEW, GPU, ["rms_norm", "linear", "moe_route", "fused_moe"]),
        (_layer, MANY, GPU, ["rms_norm", "linear", "moe_route", "fused_moe"]),
        (_layer, ONE, CPU, ["rms_norm", "linear", "moe_route", "fused_moe", "add"]),
        (_read_twice, ONE, GPU, ["linear", "moe_route", "fused_moe", "add"]),
    ],
)
def test_what_joins(fn: Any, bucket: Bucket, config: CompileConfig, expected: list[str]) -> None:
    unit = trace_unit("piece", SPECS, fn, Shapes("cpu", bucket))._replace(bucket=bucket)
    fuse_moe(unit, WeightPlan(()), config)
    if config is GPU and fn is _layer and bucket is ONE:
        fuse_linear(unit, WeightPlan(()), config)
    verify(unit.graph, "after")
    eliminate_dead(unit.graph)
    names = [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]
    assert [n.split("::")[1].split(".")[0] for n in names if "::" in n] == expected

    draw = torch.Generator().manual_seed(0)
    sizes = [(n, [bucket.lo if d == "T" else d for d in s.shape]) for n, s in SPECS.items()]
    values = {n: torch.randn(shape, generator=draw).bfloat16() for n, shape in sizes}
    arguments = [values[n.meta["label"]] for n in unit.graph.find_nodes(op="placeholder")]
    outputs = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), unit.graph)).run(*arguments)
    for found, right in zip(outputs, fn(values), strict=True):
        torch.testing.assert_close(found, right, atol=0, rtol=0)
