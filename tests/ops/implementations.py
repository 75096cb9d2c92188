"""Implementations by themselves, for tests that call them as they call the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphllm.ir import Op


def implementation(op: Op, name: str) -> Callable[..., Any]:
    """An implementation, called with the op's arguments or structs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op.impls[name].fn(**op.bind(args, kwargs))

    return call
