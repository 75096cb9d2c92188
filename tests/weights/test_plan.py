"""The weight plan: derived from a model, sized exactly, the same after a round trip through JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphllm.config import ConfigError
from graphllm.ir.weight import Weight
from graphllm.weights.dtypes import ITEMSIZE
from graphllm.weights.plan import expr as ex
from graphllm.weights.plan.plan import Entry, WeightPlan, make_plan
from tests.weights.fakes import model_of


def test_names_kinds_and_sizes() -> None:
    def layer(c: Any, kind: str) -> dict[str, Weight]:
        names: dict[str, Any] = {
            "local": ("l{layer}.q", ("l{layer}.k", "old.{layer}.k")),
            "global": ("g{layer}.q", "g{layer}.k"),
        }
        return {"qk": Weight((6, 4), sources=names[kind], segments=(4, 2))}

    plan = make_plan(
        model_of(
            {"tokens": Weight((8, 4), sources=("e",)), "inv_freq": Weight((2,), value=(1, 0.5), dtype="float32")},
            layer,
            {"out": Weight((8, 4), tie="embed.tokens")},
            kinds=("local", "global", "local"),
        ),
        config=None,
        dtype="bfloat16",
    )
    assert [e.name for e in plan] == [
        "embed.tokens",
        "embed.inv_freq",
        "layers.0.qk",
        "layers.1.qk",
        "layers.2.qk",
        "head.out",
    ]
    entries = {e.name: e for e in plan}
    assert entries["layers.2.qk"].expr == ex.Concat((ex.Read(("l2.q",), (4, 4)), ex.Read(("l2.k", "old.2.k"), (2, 4))))
    assert entries["layers.1.qk"].expr == ex.Concat((ex.Read(("g1.q",), (4, 4)), ex.Read(("g1.k",), (2, 4))))
    assert entries["embed.inv_freq"].expr == ex.Values((1.0, 0.5), (2,))
    assert entries["head.out"].expr == ex.Tie("embed.tokens")
    assert (entries["embed.inv_freq"].nbytes, entries["head.out"].nbytes) == (8, 0)
    assert plan.total_bytes == 8 * 4 * 2 + 8 + 3 * 6 * 4 * 2


def test_transposed_slices_and_stacked_experts() -> None:
    plan = make_plan(
        model_of(
            {
                "t": Weight((6, 4), sources=("a", "b"), segments=(2, 4), transpose=True),
                "s": Weight((3, 4), sources=("c",), slice_rows=(2, 5)),
                "e": Weight((2, 6, 5), sources=("g0", "u0", "g1", "u1"), segments=(3, 3, 3, 3)),
            }
        ),
        None,
        "float32",
    )
    t, s, e = (entry.expr for entry in plan)
    assert t == ex.Concat((ex.Permute(ex.Read(("a",), (4, 2)), (1, 0)), ex.Permute(ex.Read(("b",), (4, 4)), (1, 0))))
    assert s == ex.Slice(ex.Read(("c",), (ex.ANY, 4)), 0, 2, 5)
    assert e == ex.Stack(tuple(ex.Concat((ex.Read((f"g{i}",), (3, 5)), ex.Read((f"u{i}",), (3, 5)))) for i in range(2)))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (Weight((2, 2)), "exactly one of sources, tie, value and expr"),
        (Weight((2, 2), sources=("a",), tie="embed.y"), "exactly one"),
        (Weight((2, 2), value=(1.0,)), "1 values for shape"),
        (Weight((2, 2), sources=("a", "b")), "as many segments"),
        (Weight((2, 2), sources=("a", "b"), segments=(1, 2)), "do not add up"),
        (Weight((2, 2), sources=("a",), slice_rows=(0, 3)), "does not give the 2 rows"),
        (Weight((2, 2), sources=("a",), slice_rows=(3, 3)), r"a range \[a, b\)"),
        (Weight((2,), sources=("a",), transpose=True), "for matrices"),
        (Weight((2, 2), tie="embed.nothing"), "no parameter with memory"),
        (Weight((2, 3), tie="embed.y"), "but tied to"),
        (Weight((2, 2), tie="embed.z"), "no parameter with memory"),
    ],
)
def test_a_contradiction_names_the_parameter(weight: Weight, message: str) -> None:
    y, z = Weight((2, 2), sources=("y",)), Weight((2, 2), tie="embed.y")
    with pytest.raises(ValueError, match=f"^embed.x: .*{message}"):
        make_plan(model_of({"x": weight, "y": y, "z": z}), None, "float16")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"embed.x: dtype 'int3'"):
        make_plan(model_of({"x": Weight((1,), sources=("x",))}), None, "int3")


_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
_shapes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
_ints = st.integers(0, 2**40)
_reads = st.builds(
    ex.Read,
    st.lists(_names, min_size=1, max_size=3).map(tuple),
    _shapes,
    st.none() | st.sampled_from(sorted(ITEMSIZE)),
)
_values = st.builds(ex.Values, st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple), _shapes)


def _above(inner: st.SearchStrategy[ex.Expr]) -> st.SearchStrategy[ex.Expr]:
    several = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(ex.Slice, inner, _ints, _ints, _ints, _ints),
        st.builds(ex.Concat, several, _ints),
        st.builds(ex.Stack, several),
        st.builds(ex.Reshape, inner, _shapes),
        st.builds(ex.Permute, inner, _shapes),
        st.builds(ex.Repeat, inner, _ints, _ints),
        st.builds(ex.Pad, inner, _ints, _ints, _ints, st.floats(allow_nan=False, allow_infinity=False)),
        st.builds(ex.Cast, inner, st.sampled_from(sorted(ITEMSIZE))),
        st.builds(ex.Each, st.sampled_from(ex.FUNCTIONS), inner),
        st.builds(ex.Decode, _names, several, st.tuples(_ints, _ints)),
        st.builds(ex.Encode, _names, _names, inner),
    )


_exprs = st.recursive(_reads | _values, _above, max_leaves=6) | st.builds(ex.Tie, _names)
_plans = st.lists(
    st.builds(
        Entry, _names, _shapes, st.sampled_from(sorted(ITEMSIZE)), _exprs,
        st.none() | st.sampled_from(["output", "input", "vocab", "expert"]), _shapes, st.none() | _ints,
    ),
    max_size=4,
)  # fmt: skip


@given(_plans)
def test_json_round_trip(entries: list[Entry]) -> None:
    plan = WeightPlan(tuple(entries))
    text = plan.to_json()
    again = WeightPlan.from_json(text)
    assert again == plan
    assert again.to_json() == text


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.update(format=3), "format 3, this graphllm reads 2"),
        (lambda p: p["entries"][0]["expr"].update(op="fold"), "embed.x: unknown expression 'fold'"),
        (lambda p: p["entries"][0].update(expr=None), "embed.x: no expression"),
        (lambda p: p["entries"][0].update(dtype="int3"), "int3"),
        (lambda p: p["entries"][0].pop("shape"), "shape"),
        (lambda p: p["entries"][0]["expr"].update(more=1), "more"),
        (lambda p: p.pop("entries"), "entries"),
    ],
)
def test_a_damaged_plan_is_refused(edit: Any, message: str) -> None:
    plain = json.loads(make_plan(model_of({"x": Weight((1,), sources=("x",))}), None, "float32").to_json())
    edit(plain)
    with pytest.raises(ConfigError, match=message):
        WeightPlan.from_json(json.dumps(plain))


def test_cut_off_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="damaged"):
        WeightPlan.from_json('{"format": 2, "entr')
