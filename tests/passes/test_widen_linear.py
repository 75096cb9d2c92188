"""widen_linear: what rows were cast for is multiplied in the rows' dtype, with float32 results; all else stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead, verify
from graphllm.ir.registry import load_ops
from graphllm.passes.widen_linear import widen_linear
from graphllm.weights.plan.expr import Read
from graphllm.weights.plan.plan import Entry, WeightPlan

OPS = load_ops()
GPU, CPU = Target("cuda", ("sm_90", "sms_132"), "H200"), Target("cpu", ("x86_64", "avx2"))
D, T, N = 64, 5, 12
Values = dict[str, Any]


def _router(v: Values) -> tuple[Tensor, ...]:
    return (OPS["linear"](v["x"].to(v["w.router"].dtype), v["w.router"]).softmax(1), v["x"] * 2)


def _read_twice(v: Values) -> tuple[Tensor, ...]:
    return (*_router(v), v["w.router"] + 1)


def _biased(v: Values) -> tuple[Tensor, ...]:
    return (OPS["linear"](v["x"].float(), v["w.router"], v["x"][0].float()[:N].clone()),)


@pytest.mark.parametrize(
    ("fn", "dtype", "target", "widened"),
    [
        (_router, "bfloat16", GPU, True),
        (_router, "float16", GPU, True),
        (_router, "float32", GPU, False),
        (_router, "bfloat16", CPU, False),
        (_read_twice, "bfloat16", GPU, False),
        (_biased, "bfloat16", GPU, False),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_widened(
    fn: Callable[[Values], tuple[Tensor, ...]], dtype: str, target: Target, widened: bool, deterministic: bool
) -> None:
    buckets = (Bucket("decode", 1, 1), Bucket("mixed", 4, 4096))
    config = CompileConfig(target, buckets=buckets, deterministic=deterministic)
    specs = {"x": TensorSpec.contiguous(dtype, "T", D), "w.router": TensorSpec.contiguous("float32", N, D)}
    unit = trace_unit("layer.sparse", specs, fn, Shapes("cpu"))._replace(layers=(0, 3))
    read = Read(("router",), (N, D))
    before = WeightPlan(tuple(Entry(f"layers.{i}.router", (N, D), "float32", read) for i in (0, 3)))
    report = widen_linear(unit, before, config)
    verify(unit.graph, "after")
    eliminate_dead(unit.graph)
    assert report.changed == widened
    values = {"x": torch.randn(T, D).to(getattr(torch, dtype)), "w.router": torch.randn(N, D).bfloat16().float()}
    right = fn(values)
    if widened:
        assert report.plan is not None
        assert tuple(report.plan) == tuple(replace(e, name=f"{e.name}.narrow", dtype=dtype) for e in before)
        values["w.router.narrow"] = values["w.router"].to(values["x"].dtype)
    arguments = [values[n.meta["label"]] for n in unit.graph.find_nodes(op="placeholder")]
    found = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), unit.graph)).run(*arguments)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)
