"""The IR: what `verify` refuses, and a canonical form that is equal exactly for equal pieces."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import ConfigError
from graphllm.ir.graph import GraphError, Shapes, TensorSpec, eliminate_dead, target_name, target_of, verify
from graphllm.ir.graph_form import digest, from_json, to_json, to_text  # fmt: skip
from graphllm.ir.registry import load_ops
from graphllm.rewrite import Unit
from graphllm.runtime.interpreter import interpret

dense = TensorSpec.contiguous
OPS = load_ops()


def _unit(fn: Callable[[dict[str, Any]], tuple[Tensor, ...]], **inputs: TensorSpec) -> Unit:
    unit = trace_unit("test", inputs or {"x": dense("float32", "T", 16)}, fn, Shapes("cpu"))
    output = unit.graph.output_node()
    output.meta["val"] = tuple(n.meta["val"] for n in output.args[0])
    return unit


def _swiglu_twice(v: dict[str, Any]) -> tuple[Tensor, ...]:
    return (OPS["swiglu"](OPS["swiglu"](v["x"]) + 1),)


def _call(unit: Unit) -> torch.fx.Node:
    return next(n for n in unit.graph.nodes if n.op == "call_function")


def test_a_traced_graph_is_well_formed() -> None:
    verify(_unit(_swiglu_twice).graph, "here")


def test_function_that_is_no_ir_op() -> None:
    unit = _unit(_swiglu_twice)
    _call(unit).target = torch.nn.functional.gelu
    with pytest.raises(GraphError, match="no IR target"):
        verify(unit.graph, "here")


def test_node_that_is_no_call_of_an_op() -> None:
    unit = _unit(_swiglu_twice)
    with unit.graph.inserting_before(_call(unit)):
        unit.graph.call_method("relu", (_call(unit).args[0],))
    with pytest.raises(GraphError, match="here: node relu is a call_method; only calls of registered ops are allowed"):
        verify(unit.graph, "here")


def test_value_without_a_fake_tensor() -> None:
    unit = _unit(_swiglu_twice)
    del _call(unit).meta["val"]
    with pytest.raises(GraphError, match=r"here: node swiglu has no fake value; a pass must set meta\['val'\]"):
        verify(unit.graph, "here")


def test_use_before_definition() -> None:
    unit = _unit(_swiglu_twice)
    first, *_, last = [n for n in unit.graph.nodes if n.op == "call_function"]
    first.prepend(last)
    with pytest.raises(GraphError, match=r"here: .*before it has been defined"):
        verify(unit.graph, "here")


def test_write_to_something_that_is_no_input() -> None:
    attn = {
        "block_table": dense("int32", "S", 4), "query_start_loc": dense("int32", "S + 1"),
        "seq_lens": dense("int32", "S"),
    }  # fmt: skip
    kv = dense("float32", 64, 2, 2, 8, 16)
    inputs = {"q": dense("float32", "T", 4, 16), "k": dense("float32", "T", 2, 16), "kv": kv, **attn}

    def attend(v: dict[str, Any], cache: Tensor) -> tuple[Tensor, ...]:
        return (OPS["paged_attention"](v["q"], v["k"], v["k"], cache, *(v[n] for n in attn), 0.25),)

    verify(_unit(lambda v: attend(v, v["kv"]), **inputs).graph, "here")
    with pytest.raises(GraphError, match="here: paged_attention writes clone, which is not an input"):
        verify(_unit(lambda v: attend(v, v["kv"].clone()), **inputs).graph, "here")


def test_canonical_form_ignores_names_and_sees_everything_else() -> None:
    def other_constant(v: dict[str, Any]) -> tuple[Tensor, ...]:
        return (OPS["swiglu"](OPS["swiglu"](v["x"]) + 2),)

    def other_order(v: dict[str, Any]) -> tuple[Tensor, ...]:
        return (OPS["swiglu"](1 + OPS["swiglu"](v["x"])),)

    unit = _unit(_swiglu_twice)
    same = digest(to_json(unit.graph, unit.shapes))
    renamed = _unit(_swiglu_twice)
    for node in renamed.graph.nodes:
        node.name = f"other_{node.name}"
    assert digest(to_json(renamed.graph, renamed.shapes)) == same
    for different in (
        _unit(other_constant),
        _unit(_swiglu_twice, x=dense("float32", "T", 32)),
        _unit(_swiglu_twice, x=dense("bfloat16", "T", 16)),
        _unit(_swiglu_twice, x=TensorSpec("float32", ("T", 16), (20, 1))),
        _unit(_swiglu_twice, x=dense("float32", "S", 16)),
    ):
        assert digest(to_json(different.graph, different.shapes)) != same
    swapped = _unit(other_order)
    assert digest(to_json(swapped.graph, swapped.shapes)) == same  # make_fx writes both as add(x, 1)


def test_json_round_trip_computes_the_same() -> None:
    def fn(v: dict[str, Any]) -> tuple[Tensor, ...]:
        a, b = v["x"].split([6, 10], dim=1)
        total = a.sum(dim=1, keepdim=True, dtype=torch.float64).to(torch.float32)
        return OPS["swiglu"](v["x"]), b * total, torch.zeros(3, dtype=torch.int32, device="cpu")

    unit = _unit(fn)
    data = json.loads(json.dumps(to_json(unit.graph, unit.shapes)))
    x = torch.randn(5, 16)
    expected = fn({"x": x})
    rebuilt = torch.fx.GraphModule(torch.nn.Module(), from_json(data))(x)
    for found in (rebuilt, interpret(data, [x])):
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want)
    specs = [(dtype, shape, stride) for dtype, shape, stride in data["made"]]
    assert specs == [("float32", ["T", 8], [8, 1]), ("float32", ["T", 10], [10, 1]), ("int32", [3], [1])]


def test_arguments_that_have_no_place_in_the_ir() -> None:
    unit = _unit(_swiglu_twice)
    _call(unit).kwargs = {"x": {"a": 1}}
    with pytest.raises(GraphError, match=r"an argument of type (immutable_)?dict has no place in the IR"):
        to_json(unit.graph, unit.shapes)


def test_targets_round_trip_by_name() -> None:
    for target in (OPS["rope"].overload, torch.ops.aten.view.default, torch.ops.aten.add.Tensor, operator.mul):
        assert target_of(target_name(target)) is target
    with pytest.raises(ConfigError, match="the op 'from_a_plugin', which is not registered here; install its plugin"):
        target_of("graphllm::from_a_plugin")


def test_text_is_readable() -> None:
    unit = _unit(_swiglu_twice)
    assert to_text(unit.graph, unit.shapes, "a title").splitlines() == [
        "# a title",
        "input %arg0_1 (x): float32[T, 16]",
        "%swiglu: float32[T, 8] = graphllm::swiglu(%arg0_1)",
        "%add: float32[T, 8] = aten::add.Tensor(%swiglu, 1)",
        "%swiglu_1: float32[T, 4] = graphllm::swiglu(%add)",
        "return [%swiglu_1]",
    ]


def test_dead_code() -> None:
    def fn(v: dict[str, Any]) -> tuple[Tensor, ...]:
        unused = OPS["swiglu"](v["y"]) * 3
        v["z"].add_(1)
        assert unused is not None
        return (OPS["swiglu"](v["x"]),)

    shapes = Shapes("cpu")
    spec = dense("float32", "T", 16)
    unit = trace_unit("test", {"x": spec, "y": spec, "z": spec}, fn, shapes)
    assert unit.inputs == ("x", "z")  # y was only read by dead code; z is written
    targets = [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]
    assert "aten::add_.Tensor" in targets
    assert "aten::mul.Tensor" not in targets
    assert eliminate_dead(unit.graph) == 0
