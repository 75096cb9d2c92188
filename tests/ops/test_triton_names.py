"""Names that Triton kernels read: code that is generated around a kernel puts its functions, and nothing else of their
files, into one module, where two of one name become one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from graphllm.ir.registry import load_ops

tl = pytest.importorskip("triton.language")


def _is_function(value: Any) -> bool:
    known = type(value).__module__.startswith("triton.") and hasattr(value, "fn") and hasattr(value.fn, "__code__")
    return known and not (hasattr(value, "is_gluon") and value.is_gluon())  # code is not generated around those


def _called(function: Any, seen: dict[int, Any]) -> dict[int, Any]:
    """The function and all that it calls, by their ids."""
    if id(function) not in seen:
        seen[id(function)] = function.fn
        for name in function.fn.__code__.co_names:
            other = function.fn.__globals__.get(name)
            if _is_function(other):
                _called(other, seen)
    return seen


def _functions() -> Iterator[Any]:
    load_ops()
    for name, module in list(sys.modules.items()):
        if name.startswith("graphllm.ops."):
            yield from (v for v in vars(module).values() if _is_function(v))


def test_functions_of_a_kernel_have_different_names() -> None:
    functions = list(_functions())
    assert len(functions) > 50
    for function in functions:
        names = [fn.__name__ for fn in _called(function, {}).values()]
        assert len(names) == len(set(names)), f"{function.fn.__module__}.{function.fn.__name__}: {sorted(names)}"


def test_functions_read_nothing_else_of_their_files() -> None:
    constants = type(tl.constexpr(0))
    for function in _functions():
        for fn in _called(function, {}).values():
            others = {n: v for n, v in inspect.getclosurevars(fn).globals.items() if not _is_function(v)}
            odd = [n for n, v in others.items() if not isinstance(v, ModuleType | constants)]
            assert not odd, f"{fn.__module__}.{fn.__name__}: {odd}"
