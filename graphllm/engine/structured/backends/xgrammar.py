"""Structured output by XGrammar: pushdown automata, with the masks of most tokens made ahead of time.

Unlike the smaller backends it knows recursion, bounds of numbers, and grammars in GBNF.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.backends.schema_regex import REGEX_SHAPES, schema_regex, times
from graphllm.engine.structured.backends.texts import TextCompiler
from graphllm.engine.structured.source import UnsupportedError, clean
from graphllm.engine.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar

_SPACES = 66  # between two marks of JSON: a line break and what people indent with, so that they have an end
_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")  # that a message begins with: the time, and a line of the library
_PROBED = 64  # tokens
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
    _text_row: NDArray[np.int32]

    def load(self, vocabulary: Vocabulary) -> None:
        """Make its compiler; it keeps nothing, since grammars are kept here."""
        import xgrammar

        tokens = xgrammar.TokenizerInfo(list(vocabulary.texts), stop_token_ids=sorted(vocabulary.stop_ids))
        self._text_row = vocabulary.text_row
        self._compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)

    def schema(self, reduced: Any, spaces: bool) -> Any:
        """A form is a method of its compiler and what it is given."""
        if any("pattern" in node for node in _nodes(reduced)):
            return "compile_regex", _whole(reduced, spaces), {}
        text = json.dumps(_ours(reduced))
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
            raise ConfigError(f"structured_outputs.{field}: {clean(_PLACE.sub('', str(e)))}; change it") from e
        self._probe(_State(compiled))
        return lambda: _State(compiled)

    def _probe(self, state: _State) -> None:
        """Take some tokens: the library needs without limit for some expressions, such as ((a{0,20}){0,20}){0,20}, and
        only when it matches; where a grammar is tried, that is found out."""
        random, row = np.random.default_rng(0), np.zeros_like(self._text_row)
        for _ in range(_PROBED):
            state.write(row)
            row &= self._text_row
            tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not tokens.size:
                break
            state.take(int(random.choice(tokens)))


class _State:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)

    def take(self, token: int) -> bool:
        return self._matcher.accept_token(token)

    def back(self, tokens: int) -> None:
        self._matcher.rollback(tokens)

    def write(self, row: NDArray[np.int32]) -> None:
        row[:] = -1  # what it leaves as it is, it allows
        self._matcher.fill_next_token_bitmask(row[None])

    def complete(self) -> bool:
        return self._matcher.is_completed()


def _parts(node: Any) -> Iterator[Any]:
    """The schemas directly inside of one."""
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield node[name]
    for name in ("prefixItems", "anyOf"):
        yield from node.get(name, ())
    for name in ("properties", "$defs"):
        yield from node.get(name, {}).values()


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for part in _parts(node):
        yield from _nodes(part)


def _whole(reduced: Any, spaces: bool) -> str:
    """The expression of a schema with a pattern in it.

    The library's own automaton for patterns takes texts that they do not match: "a" for ((a{1,3}){2})?.
    """
    for node in _nodes(reduced):
        kind = node.get("type", "")
        stray = [name for name in node if kind in REGEX_SHAPES and name not in ("type", "$defs", *REGEX_SHAPES[kind])]
        if stray:
            raise UnsupportedError("json", "pattern", why=f"in a schema with {stray[0]}")
    return schema_regex(reduced, spaces)


def _ours(node: Any) -> Any:
    """A reduced schema without lengths that the library counts otherwise: to it an escaped pair of surrogates is two
    characters."""
    if node.get("minLength"):
        return {"type": "string", "pattern": f'^[^"\\\\\\x00-\\x1f]{times(node["minLength"], node.get("maxLength"))}$'}
    ours = dict(node)
    for name in ("items", "additionalProperties"):
        if isinstance(ours.get(name), dict):
            ours[name] = _ours(ours[name])
    for name in ("prefixItems", "anyOf"):
        if name in ours:
            ours[name] = [_ours(part) for part in ours[name]]
    for name in ("properties", "$defs"):
        if name in ours:
            ours[name] = {inside: _ours(part) for inside, part in ours[name].items()}
    return ours
