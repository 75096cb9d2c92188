"""How torch's operators are written as instructions of loops. An operator without an entry runs in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from graphllm.compile.codegen.prebuilt.loop import Loop, Register, dtype_name, is_float


class Operands(Protocol):
    """What a recipe asks: the loop to write to, and the operator's arguments.

    argument: by position or name, as it stands in the graph.
    register: an argument as a number or a row, as floats or integers; None: as it is.
    floats: whether an argument is a float. made: dtype of the result.
    """

    loop: Loop
    made: torch.dtype

    def argument(self, position: int, name: str, default: Any = None) -> Any: ...

    def register(self, value: Any, floats: bool | None = None) -> Register: ...

    def floats(self, value: Any) -> bool: ...


Recipe = Callable[[Operands], Register]
RowRecipe = Callable[[Operands, Any], list[Register]]  # of the operand, which may be turned


def _unary(code: str) -> Recipe:
    return lambda o: o.loop.emit(code, True, o.register(o.argument(0, "self"), True))


def _made_as_float(o: Operands) -> bool:
    return o.made.is_floating_point


def _binary(code: str, scaled: bool = False) -> Recipe:
    """An operator on floats or integers. scaled: its second operand by alpha."""

    def write(o: Operands) -> Register:
        floats = _made_as_float(o)
        a, b = (o.register(o.argument(i, name), floats) for i, name in enumerate(("self", "other")))
        alpha = o.argument(2, "alpha", 1) if scaled else 1
        prefix = "" if floats else "Int"
        if alpha != 1:
            b = o.loop.emit(prefix + "Mul", floats, b, o.register(alpha, floats))
        return o.loop.emit(prefix + code, floats, a, b)

    return write


def _compared(code: str, swapped: bool = False) -> Recipe:
    def write(o: Operands) -> Register:
        given = [o.argument(0, "self"), o.argument(1, "other")]
        floats = any(o.floats(v) for v in given)
        a, b = (o.register(v, floats) for v in (reversed(given) if swapped else given))
        return o.loop.emit(code if floats else "Int" + code, False, a, b)

    return write


def _integers(code: str) -> Recipe:
    return lambda o: o.loop.emit(
        code, False, *(o.register(o.argument(i, n), False) for i, n in enumerate(("self", "other")))
    )


def _truth(o: Operands, value: Any) -> Register:
    """1 or 0."""
    r = o.register(value)
    return o.loop.emit("Bool", False, r) if r.floats else o.loop.emit("IntNe", False, r, o.loop.constant(0, False))


def _logical(code: str) -> Recipe:
    return lambda o: o.loop.emit(code, False, *(_truth(o, o.argument(i, n)) for i, n in enumerate(("self", "other"))))


def _divide(o: Operands) -> Register:
    mode = o.argument(2, "rounding_mode")
    if not _made_as_float(o):
        return _integers("IntDiv")(o)
    a, b = o.register(o.argument(0, "self"), True), o.register(o.argument(1, "other"), True)
    found = o.loop.emit("Div", True, a, b)
    return found if mode is None else o.loop.emit({"floor": "Floor", "trunc": "Trunc"}[mode], True, found)


def _power(o: Operands) -> Register:
    base, exponent = o.argument(0, "self"), o.argument(1, "exponent")
    if isinstance(exponent, (int, float)) and o.floats(base):
        x = o.register(base, True)
        if exponent in (2, 3):
            square = o.loop.emit("Mul", True, x, x)
            return square if exponent == 2 else o.loop.emit("Mul", True, square, x)
        if exponent in (0.5, -0.5, -1):
            return o.loop.emit({0.5: "Sqrt", -0.5: "Rsqrt", -1: "Reciprocal"}[exponent], True, x)
    found = o.loop.emit("Pow", True, o.register(base, True), o.register(exponent, True))
    return found if _made_as_float(o) else o.loop.emit("Int", False, found)


def _clamp(o: Operands) -> Register:
    return _between(o, o.argument(1, "min"), o.argument(2, "max"))


def _between(o: Operands, low: Any, high: Any) -> Register:
    floats = _made_as_float(o)
    x, prefix = o.register(o.argument(0, "self"), floats), "" if floats else "Int"
    for bound, code in ((low, "Max"), (high, "Min")):
        if bound is not None:
            x = o.loop.emit(prefix + code, floats, x, o.register(bound, floats))
    return x


def _choose(o: Operands, which: Any, a: Any, b: Any) -> Register:
    floats = _made_as_float(o)
    code = "Choose" if floats else "IntChoose"
    return o.loop.emit(code, floats, o.register(which, False), o.register(a, floats), o.register(b, floats))


def converted(o: Operands, value: Any, dtype: torch.dtype) -> Register:
    """A value as another type, with that type's precision."""
    x, loop = o.register(value), o.loop
    if dtype == torch.bool:
        return _truth(o, value)
    if not dtype.is_floating_point:
        return loop.as_integers(x)
    x = loop.as_floats(x)
    rounding = {torch.bfloat16: "RoundBf16", torch.float16: "RoundF16"}.get(dtype)
    return x if rounding is None else loop.emit(rounding, True, x)


def _convert(o: Operands) -> Register:
    return converted(o, o.argument(0, "self"), o.made)


def _same(o: Operands) -> Register:
    return o.register(o.argument(0, "self"))


def _silu(o: Operands) -> Register:
    x = o.register(o.argument(0, "self"), True)
    return o.loop.emit("Mul", True, x, o.loop.emit("Sigmoid", True, x))


def _gelu(o: Operands) -> Register:
    x, loop = o.register(o.argument(0, "self"), True), o.loop
    one, half = loop.constant(1.0, True), loop.constant(0.5, True)
    if o.argument(1, "approximate", "none") == "tanh":
        cube = loop.emit("Mul", True, loop.emit("Mul", True, x, x), x)
        inner = loop.emit("Add", True, x, loop.emit("Mul", True, cube, loop.constant(0.044715, True)))
        turned = loop.emit("Tanh", True, loop.emit("Mul", True, inner, loop.constant(math.sqrt(2 / math.pi), True)))
    else:
        turned = loop.emit("Erf", True, loop.emit("Mul", True, x, loop.constant(math.sqrt(0.5), True)))
    return loop.emit("Mul", True, loop.emit("Mul", True, x, half), loop.emit("Add", True, turned, one))


def _softplus(o: Operands) -> Register:
    loop, x = o.loop, o.register(o.argument(0, "self"), True)
    beta, limit = float(o.argument(1, "beta", 1)), float(o.argument(2, "threshold", 20))
    scaled = x if beta == 1 else loop.emit("Mul", True, x, loop.constant(beta, True))
    soft = loop.emit("Log1p", True, loop.emit("Exp", True, scaled))
    soft = soft if beta == 1 else loop.emit("Div", True, soft, loop.constant(beta, True))
    return loop.emit("Choose", True, loop.emit("Lt", False, loop.constant(limit, True), scaled), x, soft)


def _log2(o: Operands) -> Register:
    found = _unary("Log")(o)
    return o.loop.emit("Mul", True, found, o.loop.constant(1 / math.log(2), True))


def _negated(o: Operands) -> Register:
    floats = _made_as_float(o)
    return o.loop.emit("Neg" if floats else "IntNeg", floats, o.register(o.argument(0, "self"), floats))


def _absolute(o: Operands) -> Register:
    floats = _made_as_float(o)
    return o.loop.emit("Abs" if floats else "IntAbs", floats, o.register(o.argument(0, "self"), floats))


def _bitwise_not(o: Operands) -> Register:
    x = o.register(o.argument(0, "self"), False)
    if o.made == torch.bool:
        return o.loop.emit("IntNot", False, x)
    return o.loop.emit("IntSub", False, o.loop.constant(-1, False), x)


def _constant(position: int, name: str) -> Recipe:
    def write(o: Operands) -> Register:
        value = o.argument(position, name)
        return o.register(value, _made_as_float(o))

    return write


def _same_everywhere(value: float) -> Recipe:
    return lambda o: o.loop.constant(value, _made_as_float(o))


def _infinite(o: Operands) -> Register:
    size = o.loop.emit("Abs", True, o.register(o.argument(0, "self"), True))
    return o.loop.emit("Eq", False, size, o.loop.constant(math.inf, True))


def _relu(o: Operands) -> Register:
    return _between(o, 0, None)


def _subtracted_from(o: Operands) -> Register:
    floats = _made_as_float(o)
    a, b = o.register(o.argument(0, "self"), floats), o.register(o.argument(1, "other"), floats)
    return o.loop.emit("Sub" if floats else "IntSub", floats, b, a)


ELEMENTS: Mapping[str, Recipe] = {
    "aten::add": _binary("Add", scaled=True),
    "aten::sub": _binary("Sub", scaled=True),
    "aten::rsub": _subtracted_from,
    "aten::mul": _binary("Mul"),
    "aten::div": _divide,
    "aten::floor_divide": lambda o: o.loop.emit("Floor", True, _divide(o)) if _made_as_float(o) else _divide(o),
    "aten::remainder": _binary("Mod"),
    "aten::maximum": _binary("Max"),
    "aten::minimum": _binary("Min"),
    "aten::pow": _power,
    "aten::square": lambda o: o.loop.emit("Mul", True, *[o.register(o.argument(0, "self"), True)] * 2),
    "aten::clamp": _clamp,
    "aten::clamp_min": lambda o: _between(o, o.argument(1, "min"), None),
    "aten::clamp_max": lambda o: _between(o, None, o.argument(1, "max")),
    "aten::hardtanh": lambda o: _between(o, o.argument(1, "min_val", -1.0), o.argument(2, "max_val", 1.0)),
    "aten::relu": _relu,
    "aten::neg": _negated,
    "aten::abs": _absolute,
    "aten::silu": _silu,
    "aten::gelu": _gelu,
    "aten::softplus": _softplus,
    "aten::log2": _log2,
    "aten::isnan": lambda o: o.loop.emit("IsNan", False, o.register(o.argument(0, "self"), True)),
    "aten::isinf": _infinite,
    **{f"aten::{name}": _unary(code) for name, code in {
        "exp": "Exp", "exp2": "Exp2", "expm1": "Expm1", "log": "Log", "log1p": "Log1p", "sqrt": "Sqrt",
        "rsqrt": "Rsqrt", "reciprocal": "Reciprocal", "sin": "Sin", "cos": "Cos", "tanh": "Tanh", "erf": "Erf",
        "sigmoid": "Sigmoid", "floor": "Floor", "ceil": "Ceil", "round": "Round", "trunc": "Trunc",
    }.items()},
    "aten::lt": _compared("Lt"),
    "aten::le": _compared("Le"),
    "aten::gt": _compared("Lt", swapped=True),
    "aten::ge": _compared("Le", swapped=True),
    "aten::eq": _compared("Eq"),
    "aten::ne": _compared("Ne"),
    "aten::where": lambda o: _choose(o, *(o.argument(i, n) for i, n in enumerate(("condition", "self", "other")))),
    "aten::masked_fill": lambda o: _choose(o, o.argument(1, "mask"), o.argument(2, "value"), o.argument(0, "self")),
    "aten::bitwise_and": _integers("IntAnd"),
    "aten::bitwise_or": _integers("IntOr"),
    "aten::bitwise_xor": _integers("IntXor"),
    "aten::bitwise_not": _bitwise_not,
    "aten::bitwise_left_shift": _integers("IntShiftLeft"),
    "aten::bitwise_right_shift": _integers("IntShiftRight"),
    "aten::__lshift__": _integers("IntShiftLeft"),
    "aten::__rshift__": _integers("IntShiftRight"),
    "aten::__and__": _integers("IntAnd"),
    "aten::__or__": _integers("IntOr"),
    "aten::logical_and": _logical("IntAnd"),
    "aten::logical_or": _logical("IntOr"),
    "aten::logical_xor": _logical("IntXor"),
    "aten::logical_not": lambda o: o.loop.emit("IntNot", False, _truth(o, o.argument(0, "self"))),
    "prims::convert_element_type": _convert,
    "aten::_to_copy": _convert,
    "aten::to": _convert,
    "aten::clone": _same,
    "aten::contiguous": _same,
    "aten::lift_fresh_copy": _same,
    "aten::full": _constant(1, "fill_value"),
    "aten::full_like": _constant(1, "fill_value"),
    "aten::new_full": _constant(2, "fill_value"),
    "aten::scalar_tensor": _constant(0, "s"),
    **{f"aten::{name}": _same_everywhere(v) for name, v in (
        ("zeros", 0), ("zeros_like", 0), ("new_zeros", 0), ("ones", 1), ("ones_like", 1), ("new_ones", 1))},
}  # fmt: skip


def reduced(o: Operands, code: str, value: Any) -> Register:
    """A sum, mean or extreme of a row."""
    if code == "Any":
        return o.loop.emit("IntLargest", False, _truth(o, value))
    if code == "All":
        return o.loop.emit("IntSmallest", False, _truth(o, value))
    floats = _made_as_float(o)
    return o.loop.emit(code if floats else "Int" + code, floats, o.register(value, floats))


def _one(code: str) -> RowRecipe:
    return lambda o, value: [reduced(o, code, value)]


def _first(o: Operands, value: Any, best: Register) -> Register:
    """Where a row has its extreme first."""
    loop, x = o.loop, o.register(value)
    same = loop.emit("Eq" if x.floats else "IntEq", False, x, best)
    return loop.emit(
        "IntSmallest", False, loop.emit("IntChoose", False, same, loop.place(True, None), loop.constant(2**62, False))
    )


def _extreme(code: str) -> RowRecipe:
    """The extreme of a row, and where it is."""

    def write(o: Operands, value: Any) -> list[Register]:
        x = o.register(value)
        best = o.loop.emit(code if x.floats else "Int" + code, x.floats, x)
        return [best, _first(o, value, best)]

    return write


def _variance(o: Operands, value: Any) -> tuple[Register, Register]:
    """The sum of the squares of differences from the mean, and the mean."""
    loop, x = o.loop, o.register(value, True)
    mean = loop.emit("Mean", True, x)
    off = loop.emit("Sub", True, x, mean)
    return loop.emit("Sum", True, loop.emit("Mul", True, off, off)), mean


def _corrected(o: Operands, value: Any) -> list[Register]:
    """The variance with a correction of the count, and the mean."""
    loop, (squares, mean) = o.loop, _variance(o, value)
    correction = o.argument(2, "correction", 1)
    assert loop.inner is not None
    count = loop.emit("IntSub", False, loop.size(loop.inner), loop.constant(int(correction), False))
    return [loop.emit("Div", True, squares, loop.as_floats(count)), mean]


# Of one row: operators that make one number of it, or several, in the order of their results.
ROWS: Mapping[str, RowRecipe] = {
    "aten::sum": _one("Sum"),
    "aten::mean": _one("Mean"),
    "aten::amax": _one("Largest"),
    "aten::amin": _one("Smallest"),
    "aten::any": _one("Any"),
    "aten::all": _one("All"),
    "aten::max": _extreme("Largest"),
    "aten::min": _extreme("Smallest"),
    "aten::argmax": lambda o, value: _extreme("Largest")(o, value)[1:],
    "aten::argmin": lambda o, value: _extreme("Smallest")(o, value)[1:],
    "aten::var": lambda o, value: _corrected(o, value)[:1],
    "aten::var_mean": _corrected,
}


def best_of(o: Operands, value: Any, count: int) -> Iterator[tuple[Register, Register]]:
    """The largest numbers of a row in order, each with its place."""
    loop, x = o.loop, o.register(value, True)
    for _ in range(count):
        best = loop.emit("Largest", True, x)
        same = loop.emit("Eq", False, x, best)
        there = loop.emit("IntChoose", False, same, loop.place(True, None), loop.constant(2**62, False))
        first = loop.emit("IntSmallest", False, there)
        yield best, first
        taken = loop.emit("IntEq", False, loop.place(True, None), first)
        x = loop.emit("Choose", True, taken, loop.constant(-math.inf, True), x)


def put(o: Operands) -> Register:
    """A row with a number at a place of it."""
    loop, x = o.loop, o.register(o.argument(0, "self"))
    there = loop.emit("IntEq", False, loop.place(True, None), o.register(o.argument(2, "index"), False))
    value = o.register(o.argument(3, "value"), x.floats)
    return loop.emit("Choose" if x.floats else "IntChoose", x.floats, there, value, x)


def softmax(o: Operands, logarithm: bool) -> Register:
    """Of a row, or its logarithm."""
    loop, x = o.loop, o.register(o.argument(0, "self"), True)
    below = loop.emit("Sub", True, x, loop.emit("Largest", True, x))
    power = loop.emit("Exp", True, below)
    whole = loop.emit("Sum", True, power)
    if logarithm:
        return loop.emit("Sub", True, below, loop.emit("Log", True, whole))
    return loop.emit("Div", True, power, whole)


def known(dtype: torch.dtype) -> bool:
    """Whether loops have the element type."""
    return dtype_name(dtype) is not None


def holds_floats(dtype: torch.dtype) -> bool:
    """Whether its registers are floats."""
    return is_float(str(dtype).removeprefix("torch."))
