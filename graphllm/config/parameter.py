"""How a sampling parameter is defined: once, as a field of `SamplingParams`, with all that is to be known of it.

Checks and errors, options of the command line, fields of HTTP requests, columns on the device and docs/settings.md are
made from these definitions.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from graphllm.config.errors import ConfigError

T = TypeVar("T")
_TOLD = 10  # mistakes that one error tells


class Check(NamedTuple):
    """Which values are right. remedy: what to do about others. bounds: the limits of a number, as ge, gt and le."""

    right: Callable[[Any], bool]
    remedy: str
    bounds: Mapping[str, float] = {}


class Column(NamedTuple):
    """A parameter as an array on the device, one entry for each sampled row.

    dtype: such as "float32".
    neutral: the value of a row without a request, and of a request without that wish.
    source: the object that has the value as a field of this name; "request" where it is only known once a request is
        made, as a random seed.
    """

    name: str
    dtype: str
    neutral: float
    source: Literal["params", "request"] = "params"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What is known of a field, in addition to its name, type and default.

    normal: brings values that may be written in several ways into the one that is stored. column: dtype and neutral
    value, and the source where that is not the parameter itself. body: its type in HTTP requests where that is another
    one, None for a parameter that they do not have. cli: whether commands have an option for it.
    """

    help: str
    check: Check
    normal: Callable[[Any], Any]
    column: tuple[Any, ...] | None
    body: Any
    bounds: Mapping[str, float]
    cli: bool


def parameter(
    default: Any,
    check: Check,
    *,
    help: str,
    normal: Callable[[Any], Any] = lambda value: value,
    column: tuple[Any, ...] | None = None,
    body: Any = True,
    bounds: Mapping[str, float] | None = None,
    cli: bool = True,
    hashed: bool = True,
) -> Any:
    """A field that requests set; see `Parameter`. body: True for the field's own type, False for none. bounds: of a
    request's field, where they are wider than the check's, because ``normal`` knows further values. hashed: False for
    a dict, which has no hash."""
    facts = Parameter(
        help, check, normal, column, None if body is False else body, check.bounds if bounds is None else bounds, cli
    )
    return dataclasses.field(default=default, hash=None if hashed else False, metadata={"parameter": facts})


class ParameterDefinition(NamedTuple):
    """A parameter with its name, type and default."""

    name: str
    type: Any
    default: Any
    parameter: Parameter

    @property
    def body(self) -> Any:
        """Its type in HTTP requests; None where they do not have it."""
        return self.type if self.parameter.body is True else self.parameter.body


def parameters(params: type) -> dict[str, ParameterDefinition]:
    """Every parameter of a dataclass by name, in their order."""
    return _parameters(typing.cast(Any, params))


@functools.cache
def _parameters(params: Any) -> dict[str, ParameterDefinition]:
    hints = typing.get_type_hints(params)
    return {
        f.name: ParameterDefinition(f.name, hints[f.name], f.default, f.metadata["parameter"])
        for f in dataclasses.fields(params)
        if "parameter" in f.metadata
    }


def columns(params: type) -> tuple[Column, ...]:
    """The parameters that reach the device, in their order."""
    found = parameters(params).values()
    return tuple(Column(d.name, *d.parameter.column) for d in found if d.parameter.column is not None)


def documented(params: type[T]) -> type[T]:
    """A decorator: the docstring of a dataclass goes on with a line for each parameter."""
    lines = [f"{d.name}: {d.parameter.help}" for d in parameters(params).values()]
    params.__doc__ = "\n".join([f"{params.__doc__}\n", *lines])
    return params


def normalize(params: Any, where: str = "") -> None:
    """Store every parameter of a frozen dataclass's instance in its one form; raises ConfigError naming all that is
    wrong, with ``where`` before each name. Defaults are right as they are."""
    problems = []
    for d in parameters(type(params)).values():
        given = getattr(params, d.name)
        if given is d.default:
            continue
        value = d.parameter.normal(given)
        if value is not given:
            object.__setattr__(params, d.name, value)
        if not d.parameter.check.right(value):
            problems.append(f"{where}{d.name} is {value!r:.80}: {d.parameter.check.remedy}")
    raise_all(problems)


def raise_all(problems: Iterable[str]) -> None:
    """Raise ConfigError with these, if there are any."""
    if listed := list(problems):
        raise ConfigError("; ".join(listed[:_TOLD]))


def number(remedy: str, **bounds: float) -> Check:
    """A number within bounds: ge, gt, le."""
    return Check(lambda value: is_number(value) and within(value, bounds), remedy, bounds)


def whole(remedy: str, **bounds: float) -> Check:
    """A whole number of 64 bits within bounds; larger ones do not get to a core."""
    return Check(lambda value: is_int(value) and within(value, bounds), remedy, bounds)


def optional(check: Check) -> Check:
    """The same, or None."""
    return check._replace(right=lambda value: value is None or check.right(value))


def instance(kind: type, remedy: str) -> Check:
    """An object of a class."""
    return Check(lambda value: isinstance(value, kind), remedy)


def within(value: float, bounds: Mapping[str, float]) -> bool:
    """Whether a number is within bounds: ge, gt, le."""
    low, above, high = bounds.get("ge"), bounds.get("gt"), bounds.get("le")
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)


def is_number(value: object) -> bool:
    """A finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_int(value: object) -> bool:
    """Of 64 bits; larger ones do not get to a core."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_strings(values: object) -> bool:
    """A tuple of texts, none of them empty."""
    return isinstance(values, tuple) and all(isinstance(s, str) and s for s in values)


def is_ids(values: object) -> bool:
    """A tuple of token ids."""
    return isinstance(values, tuple) and all(is_int(i) and i >= 0 for i in values)


def is_biases(values: object) -> bool:
    """Numbers by token id."""
    return isinstance(values, dict) and all(is_int(k) and k >= 0 and is_number(v) for k, v in values.items())


SWITCH = instance(bool, "give True or False")
STRINGS = Check(is_strings, "give strings that are not empty")
IDS = Check(is_ids, "give token ids")
MAPPING = optional(instance(dict, "give an object"))
