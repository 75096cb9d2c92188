"""Operands: parameters of an op that are NamedTuples. The schema has their fields as arguments of their own.

So what belongs together is written once: the op, its implementations, cost and fake take one struct, while graphs,
passes and torch see flat arguments under the names of the fields.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple


class Operand(NamedTuple):
    """A struct parameter.

    kind: the NamedTuple, which has its fields' names as arguments of the schema.
    optional: whether it may be None, which it is where its first field is.
    """

    kind: Any
    optional: bool

    def of(self, arguments: Mapping[str, Any]) -> Any:
        """The struct with the fields that are among flat arguments, or None."""
        if self.optional and arguments[self.kind._fields[0]] is None:
            return None
        return self.kind(*(arguments[name] for name in self.kind._fields))


class Operands:
    """The parameters of an op as its function has them (``signature``), and as its schema has them (``flat``).

    Flat arguments stand in the order of the parameters, those without a default first. Fields of a parameter that may
    be None may all be None. Raises TypeError where two parameters have a field of the same name.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.signature, hints = inspect.signature(fn), typing.get_type_hints(fn)
        self.structs: dict[str, Operand] = {}
        flat: list[inspect.Parameter] = []
        for parameter in self.signature.parameters.values():
            if operand := _operand(hints[parameter.name]):
                self.structs[parameter.name] = operand
                flat += _fields(operand)
            else:
                flat.append(parameter.replace(annotation=hints[parameter.name]))
        names = [p.name for p in flat]
        if twice := sorted({n for n in names if names.count(n) > 1 or n in self.structs}):
            raise TypeError(f"op {fn.__name__}: {', '.join(twice)} is an argument twice; rename a field")
        flat.sort(key=lambda p: p.default is not p.empty)
        self.flat = self.signature
        if self.structs:
            result = hints.get("return", NoneType)
            self.flat = inspect.Signature(flat, return_annotation=None if result is NoneType else result)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by their names in the schema, defaults filled in. The call has either structs, or their
        fields. Raises TypeError for what is neither."""
        kinds = tuple(operand.kind for operand in self.structs.values())
        named_so = self.structs.keys() & kwargs.keys()
        if not named_so and not any(isinstance(value, kinds) for value in (*args, *kwargs.values())):
            bound = self.flat.bind(*args, **kwargs)
            bound.apply_defaults()
            return dict(bound.arguments)
        named = dict(self.signature.bind(*args, **kwargs).arguments)
        for name in self.structs.keys() & named.keys():
            fields = named.pop(name)
            named |= fields._asdict() if fields is not None else {}
        return self.bind((), named)

    def taking(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, called with flat arguments and launch constants by name, takes what it names: arguments, structs and
        constants. Its ``**config`` gets the other constants."""
        parameters = inspect.signature(fn).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        structs = {name: self.structs[name] for name in names if name in self.structs}
        config = len(names) < len(parameters)

        @functools.wraps(fn)
        def call(**arguments: Any) -> Any:
            taken = {n: v for n, v in arguments.items() if n in names or (config and n not in self.flat.parameters)}
            return fn(**taken, **{name: operand.of(arguments) for name, operand in structs.items()})

        return call

    def flattened(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The op's function, called with flat arguments or with structs."""
        if not self.structs:
            return fn
        by_name = self.taking(fn)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return by_name(**self.bind(args, kwargs))

        call.__signature__ = self.flat  # type: ignore[attr-defined]
        return call


def _operand(hint: Any) -> Operand | None:
    """What an annotation says, if it is a NamedTuple or one that may be None."""
    kinds = typing.get_args(hint) or (hint,)
    found = [k for k in kinds if isinstance(k, type) and issubclass(k, tuple) and hasattr(k, "_fields")]
    return Operand(found[0], NoneType in kinds) if found else None


def _fields(operand: Operand) -> list[inspect.Parameter]:
    """The arguments of the schema that a struct has."""
    made = []
    for name, hint in typing.get_type_hints(operand.kind).items():
        default = operand.kind._field_defaults.get(name, None if operand.optional else inspect.Parameter.empty)
        annotation = hint | None if default is None else hint
        made.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
        )
    return made
