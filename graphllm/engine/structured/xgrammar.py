"""Structured output by XGrammar: pushdown automata, with the masks of most tokens made ahead of time.

Beside the smaller backends it knows recursion, bounds of numbers, and grammars in GBNF.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.regexes import plain_string_pattern
from graphllm.engine.structured.schema_regex import REGEX_SHAPES, times
from graphllm.engine.structured.source import UnsupportedError, clean
from graphllm.engine.structured.texts import TextCompiler
from graphllm.engine.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar

_SPACES = 66  # between two marks of JSON: a line break and what people indent with, so that they have an end
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))


class XGrammarCompiler(TextCompiler):
    """https://github.com/mlc-ai/xgrammar"""

    name = "xgrammar"
    package = "xgrammar"
    fields = frozenset(("json", "json_object", "choice", "regex", "grammar"))
    shapes: ClassVar = {
        **REGEX_SHAPES,
        "$ref": frozenset(("recursion",)),
        "integer": _BOUNDS,
        "number": _BOUNDS,
        "object": REGEX_SHAPES["object"] | {"minProperties", "maxProperties"},
    }
    _compiler: xgrammar.GrammarCompiler

    def load(self, vocabulary: Vocabulary) -> None:
        """Make its compiler; it keeps nothing, since grammars are kept here."""
        import xgrammar

        tokens = xgrammar.TokenizerInfo(list(vocabulary.texts), stop_token_ids=sorted(vocabulary.stop_ids))
        self._compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)

    def schema(self, reduced: Any, spaces: bool) -> Any:
        """A form is a method of its compiler and what it is given."""
        text = json.dumps({**_ours(reduced, "#"), "$defs": _definitions(reduced)})
        dense = {"any_whitespace": False, "separators": (",", ":")}
        return "compile_json_schema", text, {"max_whitespace_cnt": _SPACES} if spaces else dense

    def regex(self, plain: str) -> Any:
        """By its own converter."""
        return "compile_regex", plain, {}

    def grammar(self, text: str) -> Any:
        """GBNF."""
        if "::=" not in text:
            raise UnsupportedError("grammar", "Lark syntax", why="write it as GBNF, with a rule root ::= ...")
        return "compile_grammar", text, {}

    def start(self, field: str, form: Any) -> Callable[[], _State]:
        """Raises ConfigError for what the library cannot compile."""
        method, text, options = form
        try:
            compiled = getattr(self._compiler, method)(text, **options)
        except (RuntimeError, ValueError) as e:
            raise ConfigError(f"structured_outputs.{field}: {clean(str(e))}; change it") from e
        return lambda: _State(compiled)


class _State:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)

    def take(self, token: int) -> bool:
        return self._matcher.accept_token(token)

    def write(self, row: NDArray[np.int32]) -> None:
        row[:] = -1  # what it leaves as it is, it allows
        self._matcher.fill_next_token_bitmask(row[None])

    def complete(self) -> bool:
        return self._matcher.is_completed()


def _definitions(reduced: Any) -> Any:
    return {name: _ours(inside, f"#/$defs/{name}") for name, inside in reduced.get("$defs", {}).items()}


def _ours(node: Any, where: str) -> Any:
    """A reduced schema with expressions as this library reads them."""
    if "enum" in node or not isinstance(node, dict):
        return node
    ours = {name: value for name, value in node.items() if name != "$defs"}
    low, high = ours.pop("minLength", 0), ours.get("maxLength")
    if "pattern" in ours:
        if low or high is not None:
            raise UnsupportedError("json", "pattern", where, "length", "beside minLength or maxLength")
        ours["pattern"] = f"^(?:{plain_string_pattern(ours['pattern'], 'json', where)})$"
    elif low:
        # Without escapes: a pair of surrogates is one character, and two to the library.
        ours.pop("maxLength", None)
        ours["pattern"] = f'^[^"\\\\\x00-\x1f]{times(low, high)}$'
    for name in ("items", "additionalProperties"):
        if isinstance(ours.get(name), dict):
            ours[name] = _ours(ours[name], f"{where}/{name}")
    for name in ("prefixItems", "anyOf"):
        if name in ours:
            ours[name] = [_ours(part, f"{where}/{name}/{i}") for i, part in enumerate(ours[name])]
    if "properties" in ours:
        ours["properties"] = {n: _ours(v, f"{where}/properties/{n}") for n, v in ours["properties"].items()}
    return ours
