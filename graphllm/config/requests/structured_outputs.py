"""What the text of an answer must look like: `StructuredOutputsParams`, with vLLM's names and meanings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphllm.config.errors import ConfigError
from graphllm.config.parameter import is_strings, raise_all

BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
Piece = str | int  # of an output: text, or a token


class CallGrammar(NamedTuple):
    """Tool calls in a model's own words: start, one to ``most`` of the calls with ``between`` between them, end. calls:
    the text before a call's arguments, their JSON schema as text, the text after them."""

    start: tuple[Piece, ...]
    calls: tuple[tuple[tuple[Piece, ...], str, tuple[Piece, ...]], ...]
    between: tuple[Piece, ...]
    end: tuple[Piece, ...]
    most: int


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the output must look like; exactly one of the first five.

    json: a JSON schema, as text or as an object. regex: matched by the whole output. choice: one of these strings.
    grammar: context-free, in the syntax of Lark or GBNF. json_object: any JSON object.

    For JSON: disable_any_whitespace: no spaces and line breaks. whitespace_pattern: regex of the whitespace that may
    stand between any two marks; without it one space, or a line break and up to 64 spaces or tabs, so that a model
    cannot write whitespace for ever. disable_additional_properties: objects have only the properties of the schema.

    backend: the library that enforces it, one of BACKENDS; None for the engine's.
    calls: in place of the first five, tool calls that must be made; from the server, not from requests.
    """

    json: str | dict[str, Any] | None = field(default=None, hash=False)
    regex: str | None = None
    choice: tuple[str, ...] | None = None  # a list is taken too
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None  # for scripts that name it; only None
    backend: str | None = None
    calls: CallGrammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        flag = (type(None), bool)
        text = (type(None), str)
        checks = (
            ("json", isinstance(self.json, (*text, dict)), "give a JSON schema, as text or as an object"),
            ("regex", isinstance(self.regex, text), "give a regular expression"),
            ("choice", self.choice is None or (is_strings(self.choice) and self.choice), "give a list of strings"),
            ("grammar", isinstance(self.grammar, text), "give a grammar as text"),
            ("json_object", isinstance(self.json_object, flag), "give True or leave it out"),
            ("disable_any_whitespace", isinstance(self.disable_any_whitespace, bool), "give True or False"),
            (
                "disable_additional_properties",
                isinstance(self.disable_additional_properties, bool),
                "give True or False",
            ),
            ("whitespace_pattern", isinstance(self.whitespace_pattern, text), "give a regular expression"),
            ("backend", self.backend in (None, *BACKENDS), f"give one of {', '.join(BACKENDS)}"),
            ("structural_tag", self.structural_tag is None, "not supported; leave it out"),
        )
        raise_all(
            [f"structured_outputs.{name} is {getattr(self, name)!r:.80}: {way}" for name, ok, way in checks if not ok]
        )
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) + (self.calls is not None) != 1:
            raise ConfigError(
                f"structured_outputs has {' and '.join(given) or 'no constraint'}: give exactly one of "
                f"{', '.join(_CONSTRAINTS)}"
            )

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> StructuredOutputsParams:
        """From a request's object; None means not given. Raises ConfigError naming a field that there is not."""
        known = {f.name for f in dataclasses.fields(StructuredOutputsParams)} - {"calls"}
        given = {name: value for name, value in fields.items() if value is not None}
        raise_all(
            [
                f"structured_outputs.{n!s:.80} is {v!r:.80}: not supported; leave it out"
                for n, v in given.items()
                if n not in known
            ]
        )
        return StructuredOutputsParams(**given)
