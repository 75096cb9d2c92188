"""The checker finds what it is for: wrong values, shapes, padding, in-place writes, fakes, costs and schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphllm.config import Bucket
from graphllm.ir import Cost, Impl, Op
from graphllm.ir.registry import load_ops
from graphllm.ir.testing import Case, Maker
from graphllm.ir.testing.check import check_impl, check_specification, relative_error


def _double(x: Tensor, state: Tensor) -> Tensor:
    """2 x; state counts the rows."""
    state += x.shape[0]
    return 2 * x


def _inputs(T: int) -> Callable[[Maker], dict[str, Any]]:
    return lambda make: {"x": make.normal(T, 4), "state": make.tensor([0.0], torch.float32)}


def _cases(**changes: Any) -> list[Case]:
    kind = {"tolerance": {"float32": 1e-6, "bfloat16": 1e-2}, "reason": "rounding"} | changes
    return [Case(f"T{T}", _inputs(T), bucket=Bucket("decode", T, T), **kind) for T in (0, 3)]


def _op(name: str, reference: Callable[..., Any] = _double, fake: Any = torch.empty_like, cost: Any = None) -> Op:
    made = Op(f"check_{name}", reference, False, ("state",), False, cost or (lambda x, state: Cost(8, 4)))
    made.fake(lambda x, state: fake(x))
    return made


_GOOD = _op("good")


def _problems(op: Op, cases: list[Case] | None = None) -> str:
    return "\n".join(str(r) for r in check_specification(op, _cases() if cases is None else cases) if not r.ok)


def _impl_problems(fn: Callable[..., Any], **changes: Any) -> str:
    results = check_impl(_GOOD, Impl(_GOOD.name, "mine", fn, "cpu", lambda site: True), _cases(**changes))
    assert results
    return "\n".join(str(r) for r in results if not r.ok)


def test_good_op() -> None:
    assert _problems(_GOOD) == ""
    assert _impl_problems(_double) == ""


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fake_shape", {"fake": lambda x: x.new_empty((x.shape[0], 5))}, "the fake says ([3, 5]"),
        ("fake_strides", {"fake": lambda x: x.new_empty((4, x.shape[0])).t()}, "[1, 3]"),
        ("fake_dtype", {"fake": torch.Tensor.double}, "torch.float64"),
        ("cost", {"cost": lambda x, state: Cost(1.5, 0)}, "not whole numbers"),
    ],
)
def test_wrong_declarations(name: str, changes: dict[str, Any], message: str) -> None:
    assert message in _problems(_op(name, **changes))


def test_rows_that_depend_on_others_are_found() -> None:
    def total(x: Tensor, state: Tensor) -> Tensor:
        """x plus the sum of its rows."""
        state += 0
        return x + x.sum(0)

    made = _op("rowwise", total)
    assert _problems(made) == ""
    made.rowwise = True
    assert "rows by themselves give something else" in _problems(made)


def test_a_number_of_rows_that_becomes_a_constant_is_found() -> None:
    def fixes(x: Tensor, state: Tensor) -> Tensor:
        """2 x, with rows counted in Python."""
        state += 0
        return 2 * x.narrow(0, 0, int(x.shape[0]))

    made = Op("check_dynamic", fixes, False, ("state",), False, lambda x: Cost(8, 4))
    assert "takes the number of rows for a constant, T = 3" in _problems(made)


def test_undeclared_write() -> None:
    def writes(x: Tensor, state: Tensor) -> Tensor:
        """Writes x, which is not declared."""
        x += 1
        state += 1
        return 2 * x

    assert "opcheck" in _problems(_op("writes", writes))


def test_missing_cases() -> None:
    assert "no small cases" in _problems(_GOOD, [])
    assert "without tokens" in _problems(_GOOD, _cases()[1:])


def test_wrong_implementations() -> None:
    def wrong_rows(x: Tensor, state: Tensor) -> Tensor:  # right only where rows are contiguous
        return _double(torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset()), state)

    def forgets(x: Tensor, state: Tensor) -> Tensor:
        return 2 * x

    assert "output 0 is off" in _impl_problems(lambda x, state: _double(1.02 * x, state))
    assert "T3 sliced" in _impl_problems(wrong_rows)
    assert "state is off" in _impl_problems(forgets)
    assert "has shape" in _impl_problems(lambda x, state: _double(x, state)[:, :2])
    assert "strides ([3, 4], 'torch.float32', [1, 3])" in _impl_problems(
        lambda x, state: _double(x, state).t().contiguous().t()
    )
    assert "float64" in _impl_problems(lambda x, state: _double(x, state).double())
    assert "inf" in _impl_problems(lambda x, state: _double(x, state) * float("nan"))


def test_unspecified_rows_are_ignored() -> None:
    def garbage(x: Tensor, state: Tensor) -> Tensor:
        out = _double(x, state)
        out[2:] = float("nan")
        return out

    assert "off by" in _impl_problems(garbage)
    assert _impl_problems(garbage, specified=lambda out, args: out[:2]) == ""


def test_relative_error() -> None:
    inf = float("inf")
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([1.0, -inf]), torch.tensor([1.0, -inf])) == 0
    assert relative_error(torch.tensor([1.0, inf]), torch.tensor([1.0, -inf])) == inf
    assert relative_error(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize(
    ("name", "shapes", "more", "message"),
    [
        ("rms_norm", [(3, 8), (7,)], (1e-6,), "weight .*7.* for rows of 8"),
        ("layer_norm", [(3, 8), (7,), (7,)], (1e-6,), "weight .*7.* for rows of 8"),
        ("rope", [(3, 2, 8), (3, 5), (3, 5)], (), "5 angles, heads of 8"),
        ("swiglu", [(3, 7)], (), "rows of 7 have no halves"),
        ("geglu", [(3, 7)], ("tanh",), "rows of 7 have no halves"),
        ("geglu", [(3, 8)], ("erf",), "approximate is 'erf'"),
    ],
)
def test_what_does_not_fit_is_named_while_a_model_is_traced(
    name: str, shapes: list[tuple[int, ...]], more: tuple[Any, ...], message: str
) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match=message):
        load_ops()[name](*(torch.empty(shape) for shape in shapes), *more)


def test_unspecified_parts_of_states_are_ignored() -> None:
    """As a kernel leaves the scrap slot that a traced body has to write."""

    def elsewhere(x: Tensor, state: Tensor) -> Tensor:
        state[1:] += x.shape[0]
        state[:1] = -1.0
        return 2 * x

    def inputs(T: int) -> Callable[[Maker], dict[str, Any]]:
        return lambda make: {"x": make.normal(T, 4), "state": make.tensor([0.0, 5.0, 6.0], torch.float32)}

    for written, found in ({}, "state is off"), ({"written": lambda name, state, args: state[1:]}, ""):
        cases = [
            Case(f"T{T}", inputs(T), {"float32": 1e-6}, "rounding", Bucket("decode", T, T), **written) for T in (0, 3)
        ]
        results = check_impl(_GOOD, Impl(_GOOD.name, "mine", elsewhere, "cpu", lambda site: True), cases)
        problems = [str(r) for r in results if not r.ok]
        assert any(found in p for p in problems) if found else not problems


def test_all_problems_are_told() -> None:
    """Of a call whose state and strides are wrong, both; a body that raises is a failed check, and others still run."""

    def wrong(x: Tensor, state: Tensor) -> Tensor:
        return (2 * x).t().contiguous().t()

    def raises(x: Tensor, state: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise RuntimeError("no room")
        return _double(x, state)

    said = _impl_problems(wrong)
    assert "state is off" in said
    assert "but the fake says" in said
    said = _impl_problems(raises)
    assert "T3" in said
    assert "RuntimeError: no room" in said
    assert "T0" not in said
