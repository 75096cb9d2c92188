"""How a setting is defined: once, as a field of a config dataclass, with all that is to be known of it.

`EngineArgs`, the options of the command line, the artifact key and docs/settings.md are made from these definitions.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from graphllm.config.errors import ConfigError
from graphllm.config.parameter import is_int, is_number, within

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is known of a field, in addition to its name, type and default.

    help: one or two sentences. auto: what is taken where the user says nothing, because it depends on the model or the
    machine. written: the type in which users give it, where that is another one than the field's. parse: makes the
    value from a user's text. cli: whether commands have an option for it. bounds: of a number, as ge, gt and le.
    """

    help: str
    auto: str | None
    written: Any
    parse: Callable[[str], Any] | None
    cli: bool
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)


def not_key(reason: str) -> dict[str, str]:
    """Field metadata: leave the field out of the artifact key, because of ``reason``."""
    return {"not_key": reason}


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    key: Literal[True] | str = True,
    auto: str | None = None,
    written: Any = None,
    parse: Callable[[str], Any] | None = None,
    cli: bool = True,
    **bounds: float,
) -> Any:
    """A field that users set. key: True when compiled programs depend on it, else why they do not. The others: see
    `Setting`."""
    facts: dict[str, Any] = {"setting": Setting(help, auto, written, parse, cli, bounds)}
    return dataclasses.field(default=default, metadata=facts if key is True else facts | not_key(key))


class Definition(NamedTuple):
    """A setting with its place in a tree of config dataclasses. path: the names of the groups it lies in."""

    path: tuple[str, ...]
    name: str
    type: Any
    default: Any
    setting: Setting
    not_key: str | None

    @property
    def option(self) -> str | None:
        """Its option on the command line, None where it has none."""
        return "--" + self.name.replace("_", "-") if self.setting.cli else None

    @property
    def help(self) -> str:
        """What it is, and what is taken where the user says nothing, unless that is a plain default."""
        return self.setting.help if self.setting.auto is None else f"{self.setting.help} Default: {self.setting.auto}."

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values it may have; () when they cannot be listed."""
        return choices(self.setting.written or self.type)

    @property
    def unsaid(self) -> Any:
        """The value that stands for a user who says nothing."""
        if self.setting.auto is None:
            return self.default
        return "auto" if "auto" in self.choices else None

    @property
    def said(self) -> Any:
        """The type in which a user says it."""
        said = self.setting.written or self.type
        if self.setting.parse is not None:
            said = said | str
        return said | None if self.unsaid is None else said

    def read(self, value: Any) -> Any:
        """What the user says, as a value. Raises ConfigError for what it cannot be."""
        if isinstance(value, str) and self.setting.parse is not None:
            value = self.setting.parse(value)
        leave = ", or leave it out" if self.unsaid is None else ""
        if not _fits(value, self.said):
            raise ConfigError(f"{self.name} is {value!r:.80}: {self._wanted}{leave}")
        self.check(value)
        return tuple(value) if isinstance(value, (list, set)) else value

    def check(self, value: Any) -> None:
        """Raise ConfigError for a number out of bounds."""
        if is_number(value) and not within(value, self.setting.bounds):
            words = {"ge": "at least", "gt": "above", "le": "at most"}
            wanted = " and ".join(f"{words[name]} {bound}" for name, bound in self.setting.bounds.items())
            raise ConfigError(f"{self.name} is {value}: it must be {wanted}")

    @property
    def _wanted(self) -> str:
        """What to give in place of a value of another type."""
        names = [str(c) for c in self.choices if c is not None and (self.setting.auto is None or c != self.unsaid)]
        if names:
            return "use " + (f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0])
        return "give " + next((words for kind, words in _WORDS.items() if _names(self.said, kind)), "a list of them")


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal, also of one that may be None."""
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if _is_union(annotation):
        parts = typing.get_args(annotation)
        if all(part is types.NoneType or typing.get_origin(part) is Literal for part in parts):
            return tuple(c for part in parts for c in choices(part))
    return ()


_WORDS = {int: "a whole number of 64 bits", float: "a number", bool: "True or False", dict: "a dict, or a JSON object",
          str: "a text", Path: "a path"}  # fmt: skip


def _names(annotation: Any, kind: type) -> bool:
    return annotation is kind or (_is_union(annotation) and kind in typing.get_args(annotation))


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (types.UnionType, typing.Union)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of a type. True is no number, and 1 is not True."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if _is_union(annotation):
        return any(_fits(value, part) for part in arguments)
    if origin is Literal:
        return any(value == c and type(value) is type(c) for c in arguments)
    if origin in (tuple, Sequence):
        return isinstance(value, (tuple, list, set)) and all(_fits(v, arguments[0]) for v in value)
    if origin is Callable:
        return callable(value)
    check = {int: is_int, float: is_number}.get(annotation)
    return check(value) if check else isinstance(value, annotation)


def definitions(config: type, path: tuple[str, ...] = ()) -> dict[str, Definition]:
    """Every setting of a config dataclass and of the groups in it, by name, in their order."""
    found: dict[str, Definition] = {}
    hints = typing.get_type_hints(config)
    for f in dataclasses.fields(config):
        kind = hints[f.name]
        inner: dict[str, Definition] = {}
        if "setting" in f.metadata:
            facts = f.metadata["setting"]
            inner = {f.name: Definition(path, f.name, kind, f.default, facts, f.metadata.get("not_key"))}
        elif dataclasses.is_dataclass(kind):
            inner = definitions(typing.cast(type, kind), (*path, f.name))
        else:
            raise TypeError(f"{config.__name__}.{f.name} is no setting: define it by graphllm.config.setting")
        if twice := sorted({*found} & {*inner}):
            raise TypeError(f"{config.__name__}: {', '.join(twice)} is defined twice")
        found |= inner
    return found


def assemble(config: type, values: Mapping[str, Any]) -> Any:
    """An instance of a config dataclass from the values of its settings by name; what is not given has its default."""
    hints = typing.get_type_hints(config)
    given = {}
    for f in dataclasses.fields(config):
        if "setting" not in f.metadata and dataclasses.is_dataclass(hints[f.name]):
            given[f.name] = assemble(hints[f.name], values)
        elif f.name in values:
            given[f.name] = values[f.name]
    return config(**given)


def key_fields(config: object) -> dict[str, object]:
    """The part of a config dataclass that enters the artifact key: every field but those marked `not_key`,
    recursively."""
    return {
        f.name: plain(getattr(config, f.name))
        for f in dataclasses.fields(config)  # type: ignore[arg-type]
        if "not_key" not in f.metadata
    }


def plain(value: object) -> object:
    """A value of a config as JSON has it, without what is not in the key."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return key_fields(value)
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value


def parse_count(name: str, text: str) -> int:
    """The number in "4096", "4k" (4,000) or "4K" (4,096). Raises ConfigError naming the setting when it is none."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([kmgKMG]?)", text.strip())
    step = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}[found[2]] if found else 1
    if found is None or (count := float(found[1]) * step) % 1:
        raise ConfigError(f"{name} is {text!r:.80}: give a whole number, such as 4096, 4k (4,000) or 4K (4,096)")
    return int(found[1]) * step if found[1].isdigit() else int(count)


LEAST_TIER_BYTES = 10**6  # of host memory for the cache; a smaller number without a unit is gibibytes


def parse_bytes(name: str, text: str) -> int:
    """Bytes of "2GiB", "500MB" or a plain number. Raises ConfigError naming the setting when it is neither."""
    lowered = text.strip().lower().removesuffix("b")
    digits = lowered.rstrip("kmgi")
    try:
        found = int(float(digits) * _UNITS[lowered[len(digits) :]])
    except (ValueError, KeyError, OverflowError):
        found = -1
    if not 0 <= found < 2**63:
        raise ConfigError(f"{name} is {text!r:.80}: that is no amount of memory; write 2GiB, 500MB or bytes")
    return found


def parse_object(name: str, text: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError naming the setting when it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is {text!r:.80}: give a JSON object")
    return found


def size_text(count: int) -> str:
    """Bytes as people read them: 2.1 GB, 300.0 MB, 100 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
