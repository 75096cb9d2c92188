"""Units: nodes replaced by calls, with one result and several; which implementations there are at a site."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead, target_name, verify
from graphllm.ir.registry import load_ops
from graphllm.rewrite import Unit, is_implemented, results_of, site_of

OPS = load_ops()
dense = TensorSpec.contiguous
SPECS = {"x": dense("bfloat16", "T", 16), "w": dense("bfloat16", 16, 16), "n": dense("bfloat16", 16)}


def _unit() -> Unit:
    def fn(v: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        total = v["x"] + OPS["linear"](v["x"], v["w"])
        return OPS["rms_norm"](total, v["n"], 1e-5), total * 2

    return trace_unit("test", SPECS, fn, Shapes("cpu"))


def _nodes(unit: Unit) -> dict[str, torch.fx.Node]:
    calls = {target_name(n.target): n for n in unit.graph.nodes if n.op == "call_function"}
    return calls | dict(zip(unit.inputs, unit.graph.find_nodes(op="placeholder"), strict=True))


def _outputs(unit: Unit) -> Any:
    draw = torch.Generator().manual_seed(0)
    values = {"x": torch.randn(3, 16, generator=draw), "w": torch.randn(16, 16, generator=draw), "n": torch.ones(16)}
    arguments = [values[name].bfloat16() for name in unit.inputs]
    return torch.fx.GraphModule(torch.nn.Module(), unit.graph)(*arguments)


def test_a_call_takes_the_place_of_a_node() -> None:
    unit, before = _unit(), _outputs(_unit())
    nodes = _nodes(unit)
    made = unit.replace(nodes["graphllm::linear"], OPS["fused_linear"], x_TI=nodes["x"], weight_OI=nodes["w"])
    verify(unit.graph, "after")
    assert unit.shapes.spec(made.meta["val"]) == dense("bfloat16", "T", 16)
    assert [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"] == [
        "graphllm::fused_linear", "aten::add.Tensor", "graphllm::rms_norm", "aten::mul.Tensor",
    ]  # fmt: skip
    for found, expected in zip(_outputs(unit), before, strict=True):
        assert torch.equal(found, expected)


def test_several_results_take_the_places_of_several_nodes() -> None:
    unit, before = _unit(), _outputs(_unit())
    nodes = _nodes(unit)
    arguments = {"x_TI": nodes["x"], "weight_OI": nodes["w"], "residual_TO": nodes["x"], "norm_O": nodes["n"]}
    both = (nodes["aten::add.Tensor"], nodes["graphllm::rms_norm"])
    unit.replace(both, OPS["linear_add_norm"], **arguments, eps=1e-5)
    verify(unit.graph, "after")
    eliminate_dead(unit.graph, keep_inputs=True)
    assert [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"] == [
        "graphllm::linear_add_norm", "getitem", "getitem", "aten::mul.Tensor",
    ]  # fmt: skip
    assert [unit.shapes.spec(n.meta["val"]) for n in results_of(unit)] == [dense("bfloat16", "T", 16)] * 2
    for found, expected in zip(_outputs(unit), before, strict=True):
        assert torch.equal(found, expected)


def test_rows_are_bounded_by_the_tensor_and_not_by_the_bucket() -> None:
    """In a long step few rows are sampled from: kernels for few rows may serve them."""
    bucket = Bucket("mixed", 2, 4096)
    shapes = Shapes("cpu", bucket)
    config = CompileConfig(Target("cpu", ()), max_num_seqs=48)

    def rows(*shape: int | str) -> int:
        arguments = {"x_TI": shapes.tensor(dense("bfloat16", *shape)), "weight_OI": shapes.tensor(SPECS["w"])}
        return site_of(OPS["linear"], arguments, shapes, config, bucket).rows("x_TI")

    assert (rows("T", 16), rows("S", 16), rows(7, 16)) == (4096, 48, 7)


@pytest.mark.parametrize(
    ("backend", "buckets", "expected"),
    [
        ("inductor", (Bucket("decode", 1, 1), Bucket("mixed", 2, 64)), True),
        ("inductor", (), False),
        ("eager", (Bucket("decode", 1, 1),), False),
    ],
)
def test_an_op_is_implemented_where_every_bucket_has_it(backend: Any, buckets: Any, expected: bool) -> None:
    unit = _unit()
    nodes = _nodes(unit)
    config = CompileConfig(Target("cpu", ("avx2",)), backend=backend, buckets=buckets)
    arguments = {"x_TI": nodes["x"], "weight_OI": nodes["w"]}
    assert is_implemented(unit, config, OPS["linear"], **arguments) == expected
    assert not is_implemented(unit, config, OPS["rms_norm"], x=nodes["x"], weight=nodes["n"], eps=1e-5)
