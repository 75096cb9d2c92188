"""fuse_linear: what surrounds a linear layer joins it, by the bucket's size; near misses stay; results are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead, target_name, verify
from graphllm.ir.groups import OneProcess, set_group
from graphllm.ir.registry import load_ops
from graphllm.passes.fuse_linear import fuse_linear
from graphllm.rewrite import PassReport, Unit
from graphllm.weights.plan.plan import WeightPlan

OPS = load_ops()
GPU = CompileConfig(Target("cuda", ("sm_90",)))
ONE, SOME, MANY = Bucket("decode", 1, 1), Bucket("decode", 2, 16), Bucket("mixed", 2, 512)
dense = TensorSpec.contiguous
D, F = 16, 24
SPECS = {
    "x": dense("bfloat16", "T", D), "r": dense("bfloat16", "T", D), "a": dense("bfloat16", "T", D),
    "norm": dense("bfloat16", D), "square": dense("bfloat16", D, D), "up": dense("bfloat16", 2 * F, D),
    "down": dense("bfloat16", D, F), "bias": dense("bfloat16", D),
    "square_a": dense("bfloat16", 3, 4, D), "square_b": dense("bfloat16", 3, 4, D), "up_a": dense("bfloat16", 3, 8, D),
    "up_b": dense("bfloat16", 3, 4, 2 * F), "ids": dense("int32", "T"),
}  # fmt: skip
Values = dict[str, Any]
Fn = Callable[[Values], tuple[Tensor, ...]]
linear, swiglu = OPS["linear"], OPS["swiglu"]


def _norm(v: Values, x: Any, offset: float = 0.0) -> Any:
    return OPS["rms_norm"](x, v["norm"], 1e-5, offset)


def _layer(v: Values) -> tuple[Tensor, ...]:
    """From attention to the next layer's projection, as linked pieces are."""
    x = v["r"] + linear(v["a"], v["square"], v["bias"])
    x = x + linear(swiglu(linear(_norm(v, x), v["up"])), v["down"])
    return x, linear(_norm(v, x), v["up"])


def _adapted(v: Values, x: Any, name: str, widths: list[int]) -> Any:
    return OPS["add_lora"](linear(x, v[name]), x, v[name + "_a"], v[name + "_b"], v["ids"], widths)


def _adapted_layer(v: Values) -> tuple[Tensor, ...]:
    x = v["r"] + _adapted(v, v["a"], "square", [D])
    x = x + linear(swiglu(_adapted(v, _norm(v, x), "up", [F, F])), v["down"])
    return x, _adapted(v, _norm(v, x), "up", [F, F])


def _run(
    fn: Fn, bucket: Bucket, config: CompileConfig = GPU, dtype: str = "bfloat16"
) -> tuple[Unit, PassReport, list[str]]:
    specs = {n: dataclasses.replace(s, dtype=dtype) if n != "ids" else s for n, s in SPECS.items()}
    unit = trace_unit("piece", specs, fn, Shapes("cpu", bucket))._replace(bucket=bucket)
    report = fuse_linear(unit, WeightPlan(()), config)
    verify(unit.graph, "after")
    eliminate_dead(unit.graph)
    return unit, report, [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]


def _same_result(fn: Fn, unit: Unit, tokens: int) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = [(n, [tokens if d == "T" else d for d in s.shape]) for n, s in SPECS.items()]
    values = {n: torch.randn(shape, generator=draw).bfloat16() for n, shape in sizes}
    values["ids"] = torch.arange(tokens, dtype=torch.int32) % 3
    arguments = [values[n.meta["label"]] for n in unit.graph.find_nodes(op="placeholder")]
    outputs = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), unit.graph)).run(*arguments)
    for found, expected in zip(outputs, fn(values), strict=True):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_one_row_is_normalized_by_its_readers() -> None:
    unit, report, targets = _run(_layer, ONE)
    assert targets == ["graphllm::fused_linear"] * 4
    assert [n.partition(": ")[2] for n in report.notes] == [
        "linear, residual", "norm, linear, gate", "linear, residual", "norm, linear",
    ]  # fmt: skip
    _same_result(_layer, unit, 1)


@pytest.mark.parametrize("bucket", [SOME, MANY])
def test_more_rows_are_normalized_where_the_branch_ends(bucket: Bucket) -> None:
    unit, report, targets = _run(_layer, bucket)
    ops = [t for t in targets if t.startswith("graphllm::")]
    assert ops == ["graphllm::linear_add_norm", "graphllm::fused_linear"] * 2
    assert report.changed == 4
    _same_result(_layer, unit, 5)


@pytest.mark.parametrize(
    ("bucket", "ops", "parts"),
    [
        (ONE, ["fused_linear"] * 4,
         ["linear, adapters, residual", "norm, linear, adapters, gate", "linear, residual", "norm, linear, adapters"]),
        (SOME, ["linear_add_norm", "fused_linear"] * 2,
         ["linear, adapters, residual, norm", "linear, adapters, gate", "linear, residual, norm", "linear, adapters"]),
        (MANY, ["fused_linear", "add_lora", "rms_norm", "fused_linear", "add_lora", "swiglu", "linear_add_norm",
                "fused_linear", "add_lora"], ["linear", "linear", "linear, residual, norm", "linear"]),
    ],
)  # fmt: skip
def test_what_adapters_add_joins_where_rows_are_few(bucket: Bucket, ops: list[str], parts: list[str]) -> None:
    unit, report, targets = _run(_adapted_layer, bucket)
    assert [t.removeprefix("graphllm::") for t in targets if t.startswith("graphllm::")] == ops
    assert [n.partition(": ")[2] for n in report.notes] == parts
    _same_result(_adapted_layer, unit, bucket.lo)


def test_adapters_stay_where_something_else_reads_the_product() -> None:
    def fn(v: Values) -> tuple[Tensor, ...]:
        y = linear(v["x"], v["square"])
        return OPS["add_lora"](y, v["x"], v["square_a"], v["square_b"], v["ids"], [D]), y

    unit, _, targets = _run(fn, ONE)
    assert targets == ["graphllm::fused_linear", "graphllm::add_lora"]
    _same_result(fn, unit, 1)


@pytest.mark.parametrize("bucket", [ONE, SOME, MANY])
def test_on_a_cpu_the_gate_joins_where_there_is_a_kernel_for_it(bucket: Bucket) -> None:
    unit, report, targets = _run(_layer, bucket, CompileConfig(Target("cpu", ("avx2", "avx512_bf16"))))
    ops = [t for t in targets if t.startswith("graphllm::")]
    assert ops == ["graphllm::linear", "graphllm::rms_norm", "graphllm::fused_linear", "graphllm::linear",
                   "graphllm::rms_norm", "graphllm::linear"]  # fmt: skip
    assert [n.partition(": ")[2] for n in report.notes] == ["linear, gate"]
    _same_result(_layer, unit, bucket.lo)


def test_on_a_cpu_a_gate_that_is_not_alone_stays() -> None:
    def fn(v: Values) -> tuple[Tensor, ...]:
        return swiglu(y := linear(v["x"], v["up"])), y

    _, report, _ = _run(fn, SOME, CompileConfig(Target("cpu", ("avx2", "avx512_bf16"))))
    assert report.changed == 0


@pytest.mark.parametrize("bucket", [ONE, SOME, MANY])
def test_head(bucket: Bucket) -> None:
    def head(v: Values) -> tuple[Tensor, ...]:
        return (linear(_norm(v, v["x"]), v["up"]),)

    unit, report, targets = _run(head, bucket)
    assert targets == ["graphllm::fused_linear"]
    assert report.notes[0].endswith(": norm, linear")
    _same_result(head, unit, bucket.lo)


@pytest.mark.parametrize("bucket", [ONE, SOME])
@pytest.mark.parametrize(
    ("fn", "kept"),
    [
        (lambda v: (linear(_norm(v, v["x"], 1.0), v["square"]),), "graphllm::rms_norm"),
        (lambda v: (linear((n := _norm(v, v["x"])), v["square"]), n), "graphllm::rms_norm"),
        (lambda v: (swiglu(y := linear(v["x"], v["up"])), y), "graphllm::swiglu"),
        (lambda v: ((y := linear(v["x"], v["square"])) + v["r"], y), "aten::add.Tensor"),
        (lambda v: (linear(v["x"], v["square"]) + v["bias"],), "aten::add.Tensor"),
        (lambda v: (torch.add(v["r"], linear(v["x"], v["square"]), alpha=2),), "aten::add.Tensor"),
        (lambda v: ((y := linear(v["x"], v["square"])) + y,), "aten::add.Tensor"),
        (lambda v: (OPS["soft_cap"](linear(v["x"], v["up"]), 30.0),), "graphllm::soft_cap"),
    ],
    ids=["Gemma's norm", "norm read twice", "gate read twice", "sum of a value read twice", "sum with a vector",
         "scaled sum", "sum with itself", "capped logits"],
)  # fmt: skip
def test_near_misses(fn: Fn, kept: str, bucket: Bucket) -> None:
    unit, _, targets = _run(fn, bucket)
    assert kept in targets
    _same_result(fn, unit, bucket.lo)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (CompileConfig(Target("cpu", ())), "bfloat16"),
        (dataclasses.replace(GPU, backend="eager"), "bfloat16"),
        (GPU, "float32"),
    ],
    ids=["CPU", "eager", "float32"],
)
def test_other_pieces_are_left_alone(config: CompileConfig, dtype: str) -> None:
    _, report, targets = _run(_layer, SOME, config, dtype)
    assert report.changed == 0
    assert targets.count("graphllm::linear") == 4


@pytest.mark.parametrize("bucket", [ONE, SOME, MANY])
def test_sums_over_ranks_join(bucket: Bucket) -> None:
    """The kernel that adds the residual and normalizes sums over ranks, for one row, too."""

    def summed(v: Values, x: Any, weight: str) -> Any:
        return OPS["all_reduce"](linear(x, v[weight]), "tensor", 2)

    def fn(v: Values) -> tuple[Tensor, ...]:
        x = v["r"] + summed(v, v["a"], "square")
        x = x + summed(v, swiglu(linear(_norm(v, x), v["up"])), "down")
        return x, linear(_norm(v, x), v["up"])

    unit, report, targets = _run(fn, bucket)
    ops = [t for t in targets if t.startswith("graphllm::")]
    assert ops == ["graphllm::linear_add_norm", "graphllm::fused_linear"] * 2
    assert report.notes[0].endswith(": linear, all_reduce, residual, norm")
    set_group("tensor", Doubling())
    try:
        _same_result(fn, unit, 1 if bucket is ONE else 5)
    finally:
        set_group("tensor", None)


def test_a_sum_over_ranks_that_is_read_as_it_is_stays() -> None:
    def fn(v: Values) -> tuple[Tensor, ...]:
        total = OPS["all_reduce"](linear(v["a"], v["square"]), "tensor", 2)
        return _norm(v, v["r"] + total), total

    assert "graphllm::all_reduce" in _run(fn, SOME)[2]


class Doubling(OneProcess):
    """Two ranks that have the same."""

    size = 2

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        torch.add(x, x, out=out)
