"""quantize_linear: which weights it takes, which it leaves, and what becomes of graph and plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, target_name, verify
from graphllm.ir.op import op_of
from graphllm.ir.registry import load_ops
from graphllm.ops.encodings.gguf_blocks import tiles
from graphllm.passes.quantize_linear import quantize_linear
from graphllm.rewrite import PassReport, Unit
from graphllm.weights.encodings import encoding_of
from graphllm.weights.formats.integers import INTEGERS, pack
from graphllm.weights.plan.expr import Concat, Decode, Encode, Expr, Read, Tie, Values
from graphllm.weights.plan.plan import Entry, WeightPlan, decoded

OPS = load_ops()
dense = TensorSpec.contiguous
SPECS = {
    "x": dense("float32", "T", 40),
    "w.a": dense("float32", 24, 40),
    "w.b": dense("float32", 40, 24),
    "w.bias": dense("float32", 24),
}
Fn = Callable[[dict[str, Any]], tuple[Tensor, ...]]


def _plan(**exprs: Expr) -> WeightPlan:
    shapes = {"a": (24, 40), "b": (40, 24), "bias": (24,)}
    entries = []
    for owner in ("layers.0", "layers.2"):
        for name, shape in shapes.items():
            read = Read((f"{owner}.{name}",), shape)
            entries.append(Entry(f"{owner}.{name}", shape, "float32", exprs.get(name, read)))
    return WeightPlan((*entries, Entry("layers.1.a", (24, 40), "float32", Read(("other",), (24, 40)))))


def _run(fn: Fn, plan: WeightPlan | None = None, quantize: Any = "int8") -> tuple[Unit, PassReport, list[str]]:
    unit = trace_unit("layer.full", SPECS, fn, Shapes("cpu"), layers=(0, 2))
    config = CompileConfig(Target("cpu", ()), quantization=quantize)
    report = quantize_linear(unit, plan or _plan(), config)
    verify(unit.graph, "after")
    return unit, report, [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]


def _both(v: dict[str, Any]) -> tuple[Tensor, ...]:
    h = OPS["linear"](v["x"], v["w.a"], v["w.bias"])
    return (v["x"] + OPS["linear"](h, v["w.b"]),)


@pytest.mark.parametrize("name", INTEGERS)
def test_linear_layers(name: str) -> None:
    """Two layers in graph and plan; a layer of another kind keeps its weight of the same name."""
    unit, report, targets = _run(_both, quantize=name)
    assert targets == ["graphllm::quant_linear", "graphllm::quant_linear", "aten::add.Tensor"]
    assert report.changed == 2
    assert report.notes == (f"a: {name}", f"b: {name}")
    assert set(unit.inputs) == {"x", "w.bias", "w.a.values", "w.a.scales", "w.b.values", "w.b.scales"}
    assert report.plan is not None
    (of_values, of_scales), plan = INTEGERS[name].parts, report.plan
    assert len(plan.entries) == 2 * 5 + 1
    for owner in ("layers.0", "layers.2"):
        values, scales = plan[f"{owner}.a.values"], plan[f"{owner}.a.scales"]
        read = Read((f"{owner}.a",), (24, 40))
        assert values.expr == Encode(name, "values", read)
        assert (values.shape, values.dtype) == (of_values.shape(24, 40), of_values.dtype)
        assert (scales.shape, scales.dtype, scales.expr) == (
            of_scales.shape(24, 40), "bfloat16", Encode(name, "scales", read)
        )  # fmt: skip
    assert plan["layers.1.a"].expr == Read(("other",), (24, 40))
    for node in unit.graph.find_nodes(op="placeholder"):  # fake values are as in the plan
        label = node.meta["label"]
        if label.startswith("w.") and label != "w.bias":
            entry = plan[f"layers.0.{label[2:]}"]
            assert (tuple(node.meta["val"].shape), str(node.meta["val"].dtype)) == (entry.shape, f"torch.{entry.dtype}")


@pytest.mark.parametrize("name", INTEGERS)
def test_same_numbers(name: str) -> None:
    """The rewritten graph on packed weights gives what the old one gives on the weights they stand for."""
    torch.manual_seed(0)
    encoding = INTEGERS[name]
    before = trace_unit("layer.full", SPECS, _both, Shapes("cpu"))
    values = {"x": torch.randn(3, 40), "w.bias": torch.randn(24)}
    weights = {"a": torch.randn(24, 40), "b": torch.randn(40, 24)}
    for n, weight in weights.items():
        packed, scales = (torch.zeros(p.shape(*weight.shape), dtype=getattr(torch, p.dtype)) for p in encoding.parts)
        pack(weight, encoding, packed, scales)
        eye = torch.eye(weight.shape[1])
        values |= {f"w.{n}.values": packed, f"w.{n}.scales": scales}
        values[f"w.{n}"] = OPS["quant_linear"](eye, packed, scales, weight.shape[0]).T.contiguous()

    def call(unit: Unit) -> Tensor:
        module = torch.fx.GraphModule(torch.nn.Module(), unit.graph)
        return module(*(values[n] for n in unit.inputs))[0]

    torch.testing.assert_close(call(_run(_both, quantize=name)[0]), call(before), rtol=1e-5, atol=1e-5)


def test_a_head_with_a_cap_and_a_tied_weight() -> None:
    specs = {"x": dense("float32", "S", 40), "w.out": dense("float32", 100, 40)}
    unit = trace_unit(
        "head", specs, lambda v: (OPS["soft_cap"](OPS["linear"](v["x"], v["w.out"]), 6.0),), Shapes("cpu")
    )
    embedding = Entry("embed.tokens", (100, 40), "float32", Read(("e",), (100, 40)))
    plan = WeightPlan((embedding, Entry("head.out", (100, 40), "float32", Tie("embed.tokens"))))
    report = quantize_linear(unit, plan, CompileConfig(Target("cpu", ()), quantization="int4"))
    call, cap = [n for n in unit.graph.nodes if op_of(n.target)]
    assert (op_of(cap.target), cap.args) == (OPS["soft_cap"], (call, 6.0))
    assert call.kwargs["rows"] == 100
    assert report.plan is not None
    assert report.plan.entries[0] == embedding  # the embedding stays
    assert report.plan["head.out.values"].expr == Encode("int4", "values", embedding.expr)  # and is read again


@pytest.mark.parametrize(
    ("fn", "targets"),
    [
        (lambda v: (v["x"] @ v["w.a"].T,), ["aten::permute", "aten::mm"]),  # no linear layer
        (lambda v: (OPS["linear"](v["x"], v["w.a"] * 2),), ["aten::mul", "linear"]),  # no parameter
        (lambda v: (OPS["linear"](v["x"], v["w.a"]), v["w.a"].sum(0)), ["linear", "aten::sum"]),  # read elsewhere
        (lambda v: (OPS["linear"](v["w.b"].T, v["w.a"]), v["x"] + 1), None),  # a weight times a weight
    ],
)
def test_near_misses(fn: Fn, targets: list[str] | None) -> None:
    unit, report, found = _run(fn)
    if targets is None:  # the one that is a layer's weight goes, the one that is its input stays
        assert report.notes == ("a: int8",)
        assert "w.b" in unit.inputs
        return
    assert report == PassReport(0)
    assert all(t in f for t, f in zip(targets, found, strict=True)), found


def test_near_misses_in_the_plan() -> None:
    """Numbers that are not read from a checkpoint, or were quantized there already, stay as they are."""
    values = Values((0.0,) * 960, (24, 40))
    for expr in (
        values,
        Decode("int8", (Encode("int8", "values", values), Encode("int8", "scales", values)), (24, 40)),
    ):
        _, report, _ = _run(lambda v: (OPS["linear"](v["x"], v["w.a"]),), _plan(a=expr))
        assert report == PassReport(0)
    exact = WeightPlan(tuple(replace(e, exact=e.name.endswith(".a")) for e in _plan()))
    _, report, targets = _run(_both, exact)
    assert (report.changed, targets.count("graphllm::quant_linear")) == (1, 1)
    assert report.plan is not None
    assert {e.name for e in report.plan if ".a" in e.name} == {"layers.0.a", "layers.1.a", "layers.2.a"}


def test_nothing_without_the_option() -> None:
    _, report, targets = _run(_both, quantize=None)
    assert report == PassReport(0)
    assert targets == ["graphllm::linear", "graphllm::linear", "aten::add.Tensor"]


def test_parts_that_are_stored_in_different_types() -> None:
    """Neighbours of one type have one product, the bias is divided; the same numbers."""
    torch.manual_seed(0)
    types = {"q": ("q5_0", 32), "k": ("q5_0", 16), "v": ("q8_0", 16)}
    parts = tuple(decoded(f"gguf_{kind}", (n,), (rows, 64)) for n, (kind, rows) in types.items())
    plan = WeightPlan(
        tuple(Entry(f"layers.{i}.qkv", (64, 64), "float32", Concat(parts), segments=(32, 16, 16)) for i in (0, 2))
    )
    specs = {"x": dense("float32", "T", 64), "w.qkv": dense("float32", 64, 64), "w.bias": dense("float32", 64)}

    def fn(v: dict[str, Any]) -> tuple[Tensor, ...]:
        return (OPS["linear"](v["x"], v["w.qkv"], v["w.bias"]),)

    unit = trace_unit("layer.full", specs, fn, Shapes("cpu"), layers=(0, 2))
    before = torch.fx.Graph()
    before.output(before.graph_copy(unit.graph, {}))
    report = quantize_linear(unit, plan, CompileConfig(Target("cpu", ())))
    verify(unit.graph, "after")
    assert report.notes == ("qkv.0: tiled_q5_0", "qkv.1: tiled_q8_0")
    assert report.plan is not None
    assert [e.name for e in report.plan] == [f"layers.{i}.qkv.{n}.tiles" for i in (0, 2) for n in (0, 1)]
    assert report.plan["layers.0.qkv.0.tiles"].shape == (3, 2, 16 * 22)
    blocks = {
        n: torch.from_numpy(gguf.quantize(np.float32(torch.randn(rows, 64)), gguf.GGMLQuantizationType[kind.upper()]))
        for n, (kind, rows) in types.items()
    }
    whole = torch.cat([encoding_of(f"gguf_{k}").decode({"blocks": blocks[n]}, r, 64) for n, (k, r) in types.items()])
    values = {
        "x": torch.randn(5, 64), "w.qkv": whole, "w.bias": torch.randn(64),
        "w.qkv.0.tiles": tiles(torch.cat([blocks["q"], blocks["k"]]), "q5_0"),
        "w.qkv.1.tiles": tiles(blocks["v"], "q8_0"),
    }  # fmt: skip

    def call(graph: torch.fx.Graph) -> Tensor:
        labels = [n.meta["label"] for n in graph.find_nodes(op="placeholder")]
        return torch.fx.GraphModule(torch.nn.Module(), graph)(*(values[n] for n in labels))[0]

    torch.testing.assert_close(call(unit.graph), call(before), rtol=1e-5, atol=1e-5)


def test_an_embedding_and_a_head_share_a_table() -> None:
    plan = WeightPlan(
        (
            Entry("embed.tokens", (48, 64), "float32", decoded("gguf_q8_0", ("e",), (48, 64))),
            Entry("head.out", (48, 64), "float32", Tie("embed.tokens")),
        )
    )
    config = CompileConfig(Target("cpu", ()), dtype="float32")
    ids = dense("int32", "T")
    table = {"w.tokens": dense("float32", 48, 64)}
    embed = trace_unit(
        "embed", {"ids": ids, **table}, lambda v: (OPS["embedding"](v["ids"], v["w.tokens"], 8.0),), Shapes("cpu")
    )
    first = quantize_linear(embed, plan, config)
    (call,) = [n for n in embed.graph.nodes if op_of(n.target)]
    assert op_of(call.target) is OPS["gguf_embedding"]
    assert (call.kwargs["kind"], call.kwargs["dtype"], call.kwargs["scale"]) == ("q8_0", "float32", 8.0)
    assert first.plan is not None
    head = trace_unit(
        "head", {"x": dense("float32", "S", 64), "w.out": table["w.tokens"]},
        lambda v: (OPS["linear"](v["x"], v["w.out"]),), Shapes("cpu"),
    )  # fmt: skip
    second = quantize_linear(head, first.plan, config)
    assert second.plan is not None
    assert [(e.name, e.tie) for e in second.plan] == [
        ("embed.tokens.tiles", None), ("head.out.tiles", "embed.tokens.tiles")
    ]  # fmt: skip
    # A GPU has no kernel for it.
    unit = trace_unit("embed", {"ids": ids, **table}, lambda v: (OPS["embedding"](v["ids"], v["w.tokens"]),),
                      Shapes("cpu"))  # fmt: skip
    assert quantize_linear(unit, plan, CompileConfig(Target("cuda", ()), dtype="float32")) == PassReport(0)
