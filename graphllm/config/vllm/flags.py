"""Command lines as vLLM's users write them: underscores, names that are settings here under another name or change
nothing, `--model` for the argument, several words after one option, `-tp 2`, `--compilation-config.mode 3`.

The words are put into the form that the command knows before it reads them. What is no option of the command goes into
the hidden `--vllm-name`, and `graphllm.config.vllm.names` says what it means.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from graphllm.config.engine import EngineConfig
from graphllm.config.errors import ConfigError
from graphllm.config.setting import definitions
from graphllm.config.vllm.names import SHORT, VLLM_NAMES, ForeignName, as_settings, read_text, spelled

OPTION = "--vllm-name"  # given as name=value, the value as JSON


def vllm_values(given: Iterable[str]) -> dict[str, Any]:
    """What came in `--vllm-name`, by name."""
    pairs = (text.partition("=") for text in given)
    return {name: json.loads(value) for name, _, value in pairs}


class CommandLine:
    """The words of a command line, on their way into the form that the command knows.

    words: as they were given.
    command: its name.
    params: the options of the command, as click has them.
    others: names of vLLM's that are not the engine's.
    """

    def __init__(
        self, words: list[str], command: str, params: Iterable[Any], others: Mapping[str, ForeignName]
    ) -> None:
        self._others, self._names = others, {**VLLM_NAMES, **others}
        self._words, self._command = list(reversed(words)), command
        self._options = {option: p for p in params for option in (*p.opts, *p.secondary_opts)}
        self._foreign: dict[str, Any] = {}
        self._members: dict[str, dict[str, Any]] = {}  # of own options that are objects, by option
        self._named = False  # the model, so that further plain words belong to the option before them

    def rewritten(self) -> list[str]:
        """The words that the command reads."""
        out: list[str] = []
        while self._words:
            word = self._words.pop()
            if word == "--":
                return [*out, *self._as_options(), word, *reversed(self._words)]
            if word.startswith("-") and word != "-":
                out += self._option(word)
            else:
                out.append(word)
                self._named = True
        return out + self._as_options()

    def _as_options(self) -> list[str]:
        others = {name: self._foreign.pop(name) for name in [*self._foreign] if name in self._others}
        as_settings(others, {}, self._others)  # they change nothing, or are refused
        own = [word for option, value in self._members.items() for word in (option, json.dumps(value))]
        return own + [word for name, value in self._foreign.items() for word in (OPTION, f"{name}={json.dumps(value)}")]

    def _option(self, word: str) -> list[str]:
        option, equals, value = word.partition("=")
        long = option.startswith("--")
        if long:
            option = option.replace("_", "-")
        name = option[2:].replace("-", "_") if long else SHORT.get(option, "")
        if option == OPTION:
            raise ConfigError(f"No such option: {option}")
        if option in self._options:
            return self._own(option, [value] if equals else None)
        if not long and option.startswith("-O") and option[2:].isdigit():
            self._foreign["optimization_level"] = int(option[2:])
            return []
        own = _flag(name)
        if not long and own in self._options:
            return self._own(own, [value] if equals else None)
        if name == "model":
            self._named = True
            return [value] if equals else self._values(False)
        name, _, member = name.partition(".")
        off = name.removeprefix("no_")
        if member and _flag(name) in self._options:
            words = [value] if equals else self._values(False)
            members = self._members.setdefault(_flag(name), {})
            members |= {member.replace("-", "_"): read_text(word) for word in words}
        elif off != name and off in self._names and self._names[off].switch:
            self._foreign[off] = False
        elif name in self._names:
            self._other(name, member, value if equals else None)
        elif name in definitions(EngineConfig) or off in definitions(EngineConfig):
            raise ConfigError(f"{option}: `graphllm {self._command}` does not have it; leave it out (docs/settings.md)")
        else:
            near = difflib.get_close_matches(option, [*self._options, *map(_flag, self._names)], 1)
            if near and near[0] not in self._options:
                raise ConfigError(f"No such option: {option}; did you mean {near[0]}?")
            return [option + equals + value]  # the command names the nearest of its own
        return []

    def _own(self, option: str, values: list[str] | None) -> list[str]:
        """An option that the command has."""
        parameter = self._options[option]
        if getattr(parameter, "is_flag", False):
            return [option]
        if values is None:
            values = self._values(parameter.multiple and self._named)
        name = option[2:].replace("-", "_")
        read = [word for word in (spelled(name, value) for value in values) if word is not None]
        return [word for value in read for word in (option, value)] or ([] if values else [option])

    def _other(self, name: str, member: str, value: str | None) -> None:
        """A name that is no option here."""
        found: Any = True
        if value is not None:
            found = read_text(value)
        elif not self._names[name].switch:
            values = [read_text(word) for word in self._values(self._named)]
            if not values:
                raise ConfigError(f"{_flag(name)}: a value is missing after it")
            found = values[0] if len(values) == 1 else values
        if member:
            found = {**self._foreign.get(name, {}), member.replace("-", "_"): found}
        self._foreign[name] = found

    def _values(self, several: bool) -> list[str]:
        """The words after an option that belong to it."""
        found = [self._words.pop()] if self._words else []
        while several and self._words and not self._words[-1].startswith("-"):
            found.append(self._words.pop())
        return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
