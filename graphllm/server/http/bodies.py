"""The bases of the models of bodies, and readers of untyped JSON with errors that name the place, such as
``messages[0].content[1].text``."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast
from pydantic_core import PydanticCustomError

from graphllm.config import ConfigError

T = TypeVar("T")

_ENTRIES = 1 << 18  # of a list or an object of a sampling parameter; one of token ids may have the whole vocabulary
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "text",
    dict: "an object",
    list: "a list",
}


class _FailFast(FailFast):
    __hash__ = object.__hash__  # unions want one


def _few(value: Any) -> Any:
    if isinstance(value, (dict, list)) and len(value) > _ENTRIES:
        # A ValueError would keep the frame, and with it the value.
        raise PydanticCustomError("too_long", f"it has {len(value)} entries; give at most {_ENTRIES}")
    return value


Items = Annotated[list[T], _FailFast()]
"""A list. Only its first mistake is looked for: a body could have millions, and they take a gigabyte."""


def bounded(kind: Any) -> Any:
    """The type of a field with lists and objects that are not too long. Only the first mistake is looked for."""
    if isinstance(kind, UnionType):
        return reduce(or_, map(bounded, get_args(kind)))
    if get_origin(kind) is list:
        kind = Items[get_args(kind)[0]]  # type: ignore[misc]
    return Annotated[kind, BeforeValidator(_few)]


class Object(BaseModel):
    """A request's body or an object in it: for types and documentation. What it does not know it keeps, so that it is
    refused in our own words; the documentation says that there is nothing else."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})


class Answer(BaseModel):
    """What has no other fields than these."""

    model_config = ConfigDict(extra="forbid")


def within(where: str, name: str) -> str:
    """The place of a field. where: of the object that has it, "" for the body itself."""
    return f"{where}.{name}" if where else name


def unsupported(where: str, value: object) -> ConfigError:
    """The error about a value that is understood, or may be, and cannot be served."""
    return ConfigError(f"{where} is {value!r:.80}: not supported; leave it out")


def fields(value: object, where: str, known: Container[str]) -> dict[str, Any]:
    """The fields of an object that are given; null means not given. Raises ConfigError for one that is not known."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where or 'body'} is {value!r:.80}: give an object")
    given = {name: field for name, field in value.items() if field is not None}
    for name, field in given.items():
        if name not in known:
            raise unsupported(within(where, f"{name:.80}"), field)
    return given


def optional(given: Mapping[str, Any], name: str, kind: type[T], where: str = "") -> T | None:
    """A field, None when it is not given. Raises ConfigError for one of another type; true is no number."""
    value = given.get(name)
    if value is not None and type(value) is not kind:
        raise ConfigError(f"{within(where, name)} is {value!r:.80}: give {_KINDS[kind]}")
    return value


def required(given: Mapping[str, Any], name: str, kind: type[T], where: str = "") -> T:
    """A field that must be there."""
    value = optional(given, name, kind, where)
    if value is None:
        raise ConfigError(f"{within(where, name)} is missing: give {_KINDS[kind]}")
    return value


def choice(value: object, where: str, choices: Sequence[str]) -> str:
    """One of these strings."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{where} is {value!r:.80}: give {' or '.join([', '.join(choices[:-1]), choices[-1]])}")
    return value


def objects(value: object, where: str, wanted: str = "a list") -> list[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with its place. wanted: what else would do, for the error."""
    if not isinstance(value, list):
        raise ConfigError(f"{where} is {value!r:.80}: give {wanted}")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise ConfigError(f"{where}[{i}] is {item!r:.80}: give an object")
    return [(f"{where}[{i}]", item) for i, item in enumerate(value)]


def refuse_unless(given: Mapping[str, Any], neutral: Mapping[str, Any], where: str = "") -> None:
    """Raises ConfigError for a field without support, unless its value changes nothing."""
    for name, value in neutral.items():
        if name in given and (given[name] != value or type(given[name]) is not type(value)):
            raise unsupported(within(where, name), given[name])
