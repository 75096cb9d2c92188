"""align_linear: products that are split get rows of whole 16 bytes; what readers of the parts get stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, eliminate_dead, verify
from graphllm.ir.registry import load_ops
from graphllm.passes.align_linear import align_linear
from graphllm.rewrite import results_of
from graphllm.weights.plan.division import Division, WeightPart
from graphllm.weights.plan.expr import Pad, Read
from graphllm.weights.plan.plan import Entry, WeightPlan

OPS = load_ops()
CONFIG = CompileConfig(Target("cpu", ("x86_64",)))
D, T = 16, 5
Values = dict[str, Any]


def _split(v: Values) -> tuple[Tensor, ...]:
    first, last = OPS["linear"](v["x"], v["w.router"]).split((v["w.router"].shape[0] - 1, 1), 1)
    return first.softmax(1), last.sigmoid()


def _heads(v: Values) -> tuple[Tensor, ...]:
    """Views of views, and what is dense whatever it is made of."""
    first, last = OPS["linear"](v["x"], v["w.router"]).split((v["w.router"].shape[0] - 1, 1), 1)
    one, other = first.unflatten(1, (4, 3)).split((1, 2), 2)
    return one.transpose(0, 1).squeeze(2), other, other.exp().flatten(1), last.sigmoid()


def _whole(v: Values) -> tuple[Tensor, ...]:
    return (OPS["linear"](v["x"], v["w.router"]).softmax(1),)


def _read_twice(v: Values) -> tuple[Tensor, ...]:
    return (*_split(v), v["w.router"] + 1)


def _biased(v: Values) -> tuple[Tensor, ...]:
    return OPS["linear"](v["x"], v["w.router"], v["x"][0, 0].expand(13)).split((12, 1), 1)


def _plan(rows: int, **more: Any) -> WeightPlan:
    read = Read(("router",), (rows, D))
    return WeightPlan(tuple(Entry(f"layers.{i}.router", (rows, D), "float32", read, **more) for i in (0, 3)))


@pytest.mark.parametrize(
    ("fn", "rows", "more", "padded"),
    [
        (_split, 13, {}, 3),
        (_heads, 13, {}, 3),
        (_split, 16, {}, 0),
        (_whole, 13, {}, 0),
        (_read_twice, 13, {}, 0),
        (_biased, 13, {}, 0),
        (_split, 13, {"division": Division(0, (WeightPart(26, 13, 1),))}, 0),
    ],
)
def test_what_is_padded(
    fn: Callable[[Values], tuple[Tensor, ...]], rows: int, more: dict[str, Any], padded: int
) -> None:
    specs = {"x": TensorSpec.contiguous("float32", "T", D), "w.router": TensorSpec.contiguous("float32", rows, D)}
    unit = trace_unit("layer.sparse", specs, fn, Shapes("cpu"))._replace(layers=(0, 3))
    before = _plan(rows, **more)
    report = align_linear(unit, before, CONFIG)
    verify(unit.graph, "after")
    eliminate_dead(unit.graph)
    assert report.changed == bool(padded)
    values = {"x": torch.randn(T, D), "w.router": torch.randn(rows, D)}
    right = fn(values)
    if padded:
        wanted = tuple(
            replace(e, name=f"{e.name}.padded", shape=(rows + padded, D), expr=Pad(e.expr, 0, 0, padded))
            for e in before
        )
        assert report.plan is not None
        assert tuple(report.plan) == wanted
        values["w.router.padded"] = torch.cat([values["w.router"], torch.zeros(padded, D)])
    arguments = [values[n.meta["label"]] for n in unit.graph.find_nodes(op="placeholder")]
    found = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), unit.graph)).run(*arguments)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)
    for node, value in zip(results_of(unit), found, strict=True):  # where kernels will look for rows
        assert node.meta["val"].stride() == value.stride()
