"""Piece-file expressions mean what Python means by the same text, and nothing else is an expression."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphllm.program.expr import parse, value


def _join(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.tuples(children, st.sampled_from(["+", "-", "*", "//", "%"]), children).map(
        lambda t: f"({' '.join(t)})"
    )
    call = st.tuples(st.sampled_from(["min", "max"]), children, children).map(lambda t: f"{t[0]}({t[1]}, {t[2]})")
    return binary | call | children.map(lambda t: f"(-{t})")


EXPRESSIONS = st.recursive(st.sampled_from(["T", "S"]) | st.integers(0, 4096).map(str), _join, max_leaves=12)


@given(text=EXPRESSIONS, T=st.integers(1, 10_000), S=st.integers(1, 512))
def test_means_what_python_means(text: str, T: int, S: int) -> None:
    symbols = {"T": T, "S": S}
    try:
        expected = eval(text, {"__builtins__": {}, "min": min, "max": max}, symbols)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            parse(text)(symbols)
        return
    assert parse(text)(symbols) == expected


@pytest.mark.parametrize(
    "text",
    [
        "1.5", "'T'", "T / 2", "T ** 2", "T << 1", "T == 1", "[T]", "T if S else 1", "lambda: T", "T.bit_length()",
        "abs(T)", "__import__('os')", "open('f')", "(T := 2)", "T[0]", "not T", "~T", "max(*T)", "f'{T}'", "None",
        "max(T, key=S)", "True", "", "T +", "import os", "T; S",
    ],
)  # fmt: skip
def test_refuses_everything_else(text: str) -> None:
    with pytest.raises(ValueError, match="not an integer expression"):
        parse(text)


def test_unknown_symbol() -> None:
    with pytest.raises(KeyError):
        parse("T + Q")({"T": 1, "S": 1})


def test_value_takes_ints_as_they_are() -> None:
    assert (value(7, {}), value("7*T", {"T": 3})) == (7, 21)
