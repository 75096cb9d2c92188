"""The one suite over every op: documentation, cases, fake, rounding, and every implementation against the reference."""

from __future__ import annotations

import pytest

from graphllm.ir.registry import load_ops
from graphllm.ir.testing.check import cases_of, check_impl, check_specification
from tests.tiers import both_tiers

_OPS = load_ops()


@pytest.mark.parametrize("name", _OPS)
def test_specification(name: str) -> None:
    results = check_specification(_OPS[name], cases_of(_OPS[name]), few=not both_tiers())
    assert not [str(r) for r in results if not r.ok]


@pytest.mark.parametrize(("name", "impl"), [(op.name, impl) for op in _OPS.values() for impl in op.impls])
def test_implementation(name: str, impl: str) -> None:
    op = _OPS[name]
    results = check_impl(op, op.impls[impl], cases_of(op), few=not both_tiers())
    assert not [str(r) for r in results if not r.ok]
    if not results:
        pytest.skip("this machine cannot run it, or supports() holds for no case")
