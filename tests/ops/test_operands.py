"""Operands: NamedTuple parameters of an op are flat arguments of its schema, and structs where functions take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from graphllm.config import Bucket, Target
from graphllm.ir import CallSite, Cost, Op, nbytes


class Scaled(NamedTuple):
    values: Tensor
    scale: float
    offset: float = 0.5


class Table(NamedTuple):
    rows: Tensor
    ids: Tensor
    widths: list[int]


class Twice(NamedTuple):
    scale: float


def _cost(x: Tensor, scaled: Scaled, table: Table | None) -> Cost:
    return Cost(nbytes(x, scaled.values), 0 if table is None else len(table.widths))


def _sum(x: Tensor, scaled: Scaled, factor: float, table: Table | None = None, last: int = 3) -> Tensor:
    """x + factor * (values * scale + offset), and the table's rows."""
    out = x + factor * (scaled.values * scaled.scale + scaled.offset)
    return out if table is None else out + table.rows[table.ids].sum(1)


OP = Op("operands", _sum, False, (), False, _cost)
GIVEN: dict[str, Any] = {"x": torch.ones(3), "values": torch.arange(3.0), "scale": 2.0, "factor": 10.0}
TABLE = Table(torch.eye(3), torch.tensor([2, 0, 1]), [3])
SCALED = Scaled(GIVEN["values"], 2.0)


def test_the_schema_is_flat_with_what_must_be_given_first() -> None:
    assert str(OP.overload._schema) == (
        "graphllm::operands(Tensor x, Tensor values, float scale, float factor, float offset=0.5, Tensor? rows=None,"
        " Tensor? ids=None, SymInt[]? widths=None, SymInt last=3) -> Tensor"
    )


def test_calls_have_structs_or_their_fields() -> None:
    plain = GIVEN["x"] + 10 * (GIVEN["values"] * 2 + 0.5)
    for fn in (OP, OP.reference):
        assert torch.equal(fn(**GIVEN), plain)
        assert torch.equal(fn(GIVEN["x"], SCALED, 10.0), plain)
        assert torch.equal(fn(GIVEN["x"], SCALED, factor=10.0, table=TABLE), plain + 1)
        assert torch.equal(fn(**GIVEN, **TABLE._asdict()), plain + 1)
        assert torch.equal(fn(x=GIVEN["x"], scaled=SCALED, factor=10.0, table=None), plain)
    with pytest.raises(TypeError, match="missing a required argument: 'factor'"):
        OP.bind((GIVEN["x"], SCALED), {})
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        OP.bind((GIVEN["x"], SCALED, 1.0), {"scale": 2.0})


def test_functions_get_structs() -> None:
    flat = OP.bind((), GIVEN)
    assert OP.cost(**flat) == Cost(24, 0)
    assert OP.cost(**OP.bind((GIVEN["x"], SCALED, 1.0, TABLE), {})) == Cost(24, 1)

    def mine(scaled: Scaled, table: Table | None, offset: float, **config: int) -> Any:
        return scaled, table, offset, config

    OP.impl("mine", device="cpu")(mine)
    assert OP.impls["mine"].fn(**flat, warps=4) == (SCALED, None, 0.5, {"warps": 4})
    site = CallSite(flat, Target("cpu", ()), Bucket("decode", 1, 1))
    assert site.struct(Scaled) == SCALED
    OP.tuning_inputs(lambda scaled: {"values": scaled.values + 1})
    assert torch.equal(OP.with_tuning_inputs(flat)["values"], GIVEN["values"] + 1)
    with pytest.raises(TypeError, match=r"scales of a cost or fake is none of its arguments, x, .*scaled, table"):
        OP.fake(lambda scales: scales)


def test_a_field_is_the_only_argument_of_its_name() -> None:
    def clash(x: Tensor, one: Scaled, two: Twice) -> Tensor:
        return x

    with pytest.raises(TypeError, match="op clash: scale is an argument twice; rename a field"):
        Op("operands_clash", clash, False, (), False, lambda x: Cost(0, 0))
