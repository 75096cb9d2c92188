"""What a request's constraint asks for, in a form that can be looked up, and what a backend says that it cannot do."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.engine.structured.schemas.schema import parse_schema

if TYPE_CHECKING:
    from graphllm.config.requests.sampling_params import StructuredOutputsParams

_MAX_MESSAGE = 300
_CHEAP_TEXT = 20_000  # characters up to which a text compiles in less than 0.1 s, whatever it says
_CHEAP_PATTERN = 200  # of a pattern that is compared with another one

Key = tuple[str, Any, bool, bool, str | None]


class GrammarError(RuntimeError):
    """The output cannot go on under its grammar: a token that it does not allow, or a limit of the library."""


class UnsupportedError(ConfigError):
    """What one backend cannot do, and another one may.

    field: of the constraint.
    where: place in it, such as "#/properties/a".
    what: the keyword, or the part of an expression.
    kind: of the values that the keyword is about; "field" where it is the whole constraint, "never" where no backend
    can do it, and empty where llguidance may.
    """

    def __init__(self, field: str, what: str, where: str = "", kind: str = "", why: str = "") -> None:
        self.field, self.what, self.where, self.kind, self.why = field, what, where, kind, why
        super().__init__(self.message_for("this backend", ()))

    def message_for(self, backend: str, able: tuple[str, ...]) -> str:
        """The message. able: backends that can do it."""
        place = f"{self.where}: " if self.where else ""
        remedy = f"use the backend {' or '.join(able)}, or leave it out" if able else "leave it out"
        why = f" ({self.why})" if self.why else ""
        return f"structured_outputs.{self.field}: {place}{self.what} is not supported by {backend}{why}; {remedy}"


class GrammarSource(NamedTuple):
    """The constraint of a request.

    field: the given field of `StructuredOutputsParams`.
    content: its value, in a form that can be looked up.
    cheap: it is short, so only its meaning can make it expensive.
    """

    field: str
    content: Any
    cheap: bool


def source_of(spec: StructuredOutputsParams) -> GrammarSource:
    """Raises ConfigError for a schema that is none."""
    pattern = len(spec.whitespace_pattern or "") <= _CHEAP_PATTERN
    if spec.json is not None:
        text = spec.json if isinstance(spec.json, str) else json.dumps(parse_schema(spec.json))
        return GrammarSource("json", text, pattern and len(text) <= _CHEAP_TEXT)
    if spec.json_object:
        return GrammarSource("json_object", True, pattern)
    if spec.choice is not None:
        return GrammarSource("choice", tuple(spec.choice), sum(map(len, spec.choice)) <= _CHEAP_TEXT)
    if spec.regex is not None:
        return GrammarSource("regex", spec.regex, len(spec.regex) <= _CHEAP_TEXT)
    if spec.grammar is not None:
        return GrammarSource("grammar", spec.grammar, len(spec.grammar) <= _CHEAP_TEXT)
    if spec.calls is not None:
        return GrammarSource("calls", spec.calls, sum(len(schema) for _, schema, _ in spec.calls.calls) <= _CHEAP_TEXT)
    raise ConfigError("structured_outputs: empty; give one of json, json_object, choice, regex, grammar")


def key_of(source: GrammarSource, spec: StructuredOutputsParams) -> Key:
    """What two constraints with the same grammar have in common."""
    options = (spec.disable_any_whitespace, spec.disable_additional_properties, spec.whitespace_pattern)
    return (source.field, source.content, *options)


def clean(message: str) -> str:
    """A library's message as one line of bounded length, without its repetition of the source."""
    head = re.split(r"\n[ \t]*\d+ \|", message.replace("<non-verbose/>", ""))[0]
    line = " ".join(re.sub(r"^at \S+ failed to compile JSON schema: ", "", head).split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."
