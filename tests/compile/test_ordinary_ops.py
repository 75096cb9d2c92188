"""What is told of a traced model's ordinary ops: how often they run, and their share of a step's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.fx import Graph

from graphllm.compile.transformers_model.adoption import Adopted
from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.compile.transformers_model.report import ordinary_ops
from graphllm.ir.graph import Shapes
from graphllm.ops.gemm.linear import linear

aten = torch.ops.aten
D, F = 64, 96


def _recipe(
    shapes: Shapes, calls: list[tuple[Any, int, int]], notes: Mapping[int, str] = MappingProxyType({})
) -> Recipe:
    """A product with a matrix [rows, columns] for each call, one after the other. notes: by the call's number."""
    graph, made = Graph(), []
    with shapes.mode:
        value = torch.zeros(shapes.symbols["T"], calls[0][2], dtype=torch.bfloat16)  # type: ignore[arg-type]
        node = graph.placeholder("x")
        node.meta["val"] = value
        for number, (target, rows, columns) in enumerate(calls):
            matrix = graph.placeholder(f"w.w{number}")
            matrix.meta["val"] = torch.zeros(rows, columns, dtype=torch.bfloat16)
            node = graph.call_function(target, (node, matrix))
            node.meta["val"] = value = value @ matrix.meta["val"].T
            made.append(node.name)
    graph.output((node,))
    return Recipe(graph, {}, tuple((made[number], why) for number, why in notes.items()))


def _bytes(rows: int, columns: int) -> int:
    """Of a product for one token: what it reads, the matrix, and what it makes."""
    return 2 * (columns + rows * columns + rows)


def test_shares() -> None:
    shapes, own, plain = Shapes("cpu"), linear.overload, aten.linear.default
    first = _recipe(shapes, [(own, F, D), (plain, D, F)], {1: "a product of another form"})
    second = _recipe(shapes, [(plain, 2, 4), (plain, D, D)][1:])
    tiny = _recipe(shapes, [(plain, 1, 2)])
    model = Adopted("X", tiny, {"full": first, "other": second}, tiny, ("full", "full", "other"), 1, 1, shapes)
    whole = 2 * (_bytes(F, D) + _bytes(D, F)) + _bytes(D, D) + 2 * _bytes(1, 2)
    found = ordinary_ops(model)
    assert [(o.unit, o.what, o.why, o.times) for o in found] == [
        ("full", "aten.linear", "a product of another form", 2),
        ("other", "aten.linear", "no op does the same", 1),
    ]  # and of the small ones nothing
    assert [o.share for o in found] == [pytest.approx(2 * _bytes(D, F) / whole), pytest.approx(_bytes(D, D) / whole)]


def test_a_note_of_no_call_has_no_share() -> None:
    shapes = Shapes("cpu")
    unit = _recipe(shapes, [(linear.overload, D, D)])._replace(notes=(("gate, up", "they are apart"),))
    (found,) = ordinary_ops(Adopted("X", unit, {}, _recipe(shapes, [(linear.overload, D, D)]), (), 1, 1, shapes))
    assert (found.unit, found.what, found.why, found.times, found.share) == (
        "embed", "gate, up", "they are apart", 1, None,
    )  # fmt: skip
