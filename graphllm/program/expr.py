"""Integer expressions over the symbols T, S and R, as they stand in piece files: sizes, strides, offsets, grids."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"max": max, "min": min}


@cache
def parse(text: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function from symbol values to the expression's value. Raises ValueError for anything but integer
    arithmetic."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as damage:
        raise ValueError(f"not an integer expression over T, S and R: {text!r}") from damage
    return _build(tree.body, text)


def _build(node: ast.expr, text: str) -> Callable[[Mapping[str, Any]], Any]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        constant = node.value
        return lambda values: constant
    if isinstance(node, ast.Name):
        name = node.id
        return lambda values: values[name]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        apply, left, right = _OPERATORS[type(node.op)], _build(node.left, text), _build(node.right, text)
        return lambda values: apply(left(values), right(values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _build(node.operand, text)
        return lambda values: -inner(values)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and not node.keywords
    ):
        function, parts = _FUNCTIONS[node.func.id], [_build(a, text) for a in node.args]
        return lambda values: function(*(p(values) for p in parts))
    raise ValueError(f"not an integer expression over T, S and R: {text!r}")


def value(dim: int | str, symbols: Mapping[str, int]) -> int:
    """The value of a dimension: itself when it is an int, else the expression's value."""
    return dim if isinstance(dim, int) else parse(dim)(symbols)
