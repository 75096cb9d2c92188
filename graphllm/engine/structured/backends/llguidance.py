"""Structured output by llguidance: grammars compiled for one checkpoint's tokenizer, and the masks of tokens that may
come next. The library is imported when first needed. Nothing here is shared between compilers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.compiler import CachingCompiler, Prepared
from graphllm.engine.structured.schemas.patterns import ascii_classes, check_regex
from graphllm.engine.structured.schemas.schema import parse_schema, rewrite_schema
from graphllm.engine.structured.source import GrammarError, GrammarSource, clean
from graphllm.engine.structured.vocabulary import read_tokenizer

if TYPE_CHECKING:
    import llguidance

    from graphllm.config.requests.sampling_params import StructuredOutputsParams
    from graphllm.config.requests.structured_outputs import CallGrammar, Piece

# A model may begin to write whitespace and never end, so there is no more of it than people indent JSON with.
_WHITESPACE = r"[ ]?|\n[ \t]{0,64}"
_MAX_TEXT = 200_000  # characters of a regex, a grammar, or all choices
_MAX_REPEATS = 5000  # of a regex or a grammar; time and memory to compile them grow with the square
# Expressions over what a request sends must not backtrack far: no other Python code runs during a match.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_LARK_ATTRIBUTE = re.compile(
    r"^[ \t]*[?!]?[\w-]+\s*\[(?:[^\[\]:\"]|\"[^\"\n]*\")*\b(temperature|max_tokens|stop)\b", re.MULTILINE
)
_LARK_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/|//.*|#.*')
# \uXXXX would be another way to write a property's name, past what the schema says of it; characters need no escape.
_ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True)
class LlguidanceVocabulary:
    """What tokens are and how masks are laid out.

    size: tokens of the model.
    tokens: tokens that the tokenizer has, too.
    never: tokens that the library wrongly takes for an end of output.
    stops, nevers: where the bits of stop tokens and of ``never`` are, as word and bit.
    """

    tokenizer: llguidance.LLTokenizer
    size: int
    tokens: int
    stop_ids: frozenset[int]
    never: frozenset[int]
    stops: tuple[tuple[int, int], ...]
    nevers: tuple[tuple[int, int], ...]

    def text(self, token: int) -> bool:
        """Whether a token may be part of the output's text."""
        return 0 <= token < self.tokens and token not in self.stop_ids and token not in self.never


class LlguidanceGrammar:
    """A compiled grammar. Requests share it, each through a matcher of its own."""

    def __init__(self, vocabulary: LlguidanceVocabulary, start: llguidance.LLMatcher) -> None:
        self._vocabulary, self._start = vocabulary, start

    def matcher(self) -> LlguidanceMatcher:
        """One at the start of the output."""
        return LlguidanceMatcher(self._vocabulary, self._start.deep_copy())


class LlguidanceMatcher:
    """Where one request's output stands in its grammar. After a GrammarError it is of no more use."""

    def __init__(self, vocabulary: LlguidanceVocabulary, state: llguidance.LLMatcher) -> None:
        self._vocabulary, self._state = vocabulary, state
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether a stop token has ended the output."""
        return self._finished

    def advance(self, token: int) -> None:
        """Take the next token; a stop token ends the output. Raises GrammarError when it may not come next."""
        if self._finished:
            raise GrammarError(f"token {token} after the end of the output")
        if token in self._vocabulary.stop_ids:
            if not self._state.is_accepting():
                raise GrammarError(f"stop token {token} before the end of the output")
            self._finished = True
        elif not self._vocabulary.text(token):
            raise GrammarError(f"token {token} is no text")
        elif not self._state.consume_token(token):
            raise self._error()

    def allow(self, row: NDArray[np.int32]) -> None:
        """Write what may come next: bit t % 32 of word t // 32 is 1 for an allowed token t, and 0 for all others.

        row: int32 [ceil(V / 32)] of the model's vocabulary V, contiguous. After the end only stop tokens are allowed.
        Raises GrammarError when no token may come next.
        """
        v = self._vocabulary
        bits = row.view(np.uint32)
        if self._finished:
            bits[:] = 0
            ends = True
        else:
            words = _words(v.tokenizer.vocab_size)
            target = row if words == row.size else np.empty(words, np.int32)
            self._state.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
            if self._state.is_error():
                raise self._error()
            if target is not row:
                row[:words] = target[: row.size]
                row[words:] = 0
            if v.tokenizer.vocab_size > v.size and v.size % 32:
                bits[-1] &= (1 << v.size % 32) - 1
            ends = self._state.is_accepting()
        for word, bit in v.nevers if ends else v.nevers + v.stops:
            bits[word] &= bit ^ 0xFFFFFFFF
        if ends:
            for word, bit in v.stops:
                bits[word] |= bit
        if not row.any():
            raise GrammarError("the grammar allows no token here")

    def validate(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, `advance` would take. Changes nothing."""
        if self._finished:
            return 0
        v = self._vocabulary
        text = list(tokens)
        end = next((i for i, t in enumerate(text) if not v.text(t)), len(text))
        taken = self._state.try_consume_tokens(text[:end])
        if self._state.is_error():
            raise self._error()
        stops = taken == end < len(text) and text[end] in v.stop_ids and self._state.is_accepting()
        self._back(taken)
        return taken + stops

    def rollback(self, tokens: int) -> None:
        """Undo the last ``tokens`` that `advance` took, a stop token among them."""
        undo_stop = self._finished and tokens > 0
        self._back(tokens - undo_stop)
        self._finished = self._finished and not undo_stop

    def _back(self, tokens: int) -> None:
        if tokens and not self._state.rollback(tokens):
            raise self._error()

    def _error(self) -> GrammarError:
        return GrammarError(clean(self._state.get_error()))


class GrammarCompiler(CachingCompiler[LlguidanceGrammar]):
    """llguidance, the backend that enforces most."""

    name = "guidance"
    package = "llguidance"
    fields = frozenset(("json", "json_object", "choice", "regex", "grammar", "calls"))
    shapes = None

    def __init__(self, tokenizer_folder: Path, vocab: int, stop_ids: frozenset[int]) -> None:
        super().__init__(tokenizer_folder, vocab, stop_ids)
        self._vocabulary: LlguidanceVocabulary | None = None

    def prepare(self, source: GrammarSource, spec: StructuredOutputsParams) -> Prepared:
        """In the library's dialect of Lark."""
        try:
            return _lark(source, spec)
        except UnicodeEncodeError as e:
            raise ConfigError(f"structured_outputs.{source.field}: {clean(str(e))}; leave that character out") from e

    def build(self, field: str, form: str, spec: StructuredOutputsParams) -> LlguidanceGrammar:
        """Raises ConfigError for what matches nothing, too."""
        if spec.whitespace_pattern is not None:
            self._check_whitespace(spec.whitespace_pattern)
        return self._compile(f"structured_outputs.{field}", form)

    def _compile(self, field: str, lark: str) -> LlguidanceGrammar:
        vocabulary = self._load()
        start = _start(vocabulary, lark)
        if start.is_error():
            raise ConfigError(f"{field}: {clean(start.get_error())}; change it")
        if warnings := start.get_grammar_warnings():
            raise ConfigError(f"{field}: {clean('; '.join(warnings))}; change it")
        grammar = LlguidanceGrammar(vocabulary, start)
        try:
            # On the shared start, so that requests find the first mask's work done; and what matches nothing shows.
            LlguidanceMatcher(vocabulary, start).allow(np.empty(_words(vocabulary.size), np.int32))
        except GrammarError as e:
            raise ConfigError(f"{field}: matches nothing, or is too large ({e}); change it") from e
        return grammar

    def _check_whitespace(self, pattern: str) -> None:
        """Refuse a pattern that matches anything else, which would not be JSON."""
        name, terminal = "structured_outputs.whitespace_pattern", _terminal(pattern)
        start = _start(self._load(), f"start: {terminal}")
        if start.is_error():
            raise ConfigError(f"{name}: {clean(start.get_error())}; change it")
        other = _start(self._load(), f"start: OTHER\nOTHER: {terminal} & ~/[ \\t\\n\\r]*/")
        other.compute_bitmask()  # fails where nothing matches
        if not other.is_error():
            raise ConfigError(f"{name}: {pattern!r:.80} matches more than JSON whitespace; use [ \\t\\n\\r] only")

    def _load(self) -> LlguidanceVocabulary:
        """The tokenizer in the library's form; about a second for large ones, the first time."""
        with self._lock:
            if self._vocabulary is None:
                stop_ids = self.usable_stops()
                tokenizer = read_tokenizer(self._folder)
                never = frozenset(tokenizer.eos_tokens) - stop_ids
                self._vocabulary = LlguidanceVocabulary(
                    tokenizer,
                    size=self._vocab,
                    tokens=min(tokenizer.vocab_size, self._vocab),
                    stop_ids=stop_ids,
                    never=never,
                    stops=_places(stop_ids),
                    nevers=_places(i for i in never if i < self._vocab),
                )
            return self._vocabulary


def _start(vocabulary: LlguidanceVocabulary, lark: str) -> llguidance.LLMatcher:
    """A matcher of the library at the start; perhaps in its error state."""
    import llguidance

    # Where one text only can follow, the library would allow one way of cutting it into tokens; all are right.
    text = llguidance.LLMatcher.grammar_from_lark(f'{lark}\n%llguidance {{"no_forcing": true}}\n')
    limits = llguidance.LLParserLimits(verbose_errors=False)
    return llguidance.LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)


def _places(tokens: Iterable[int]) -> tuple[tuple[int, int], ...]:
    return tuple((i // 32, 1 << i % 32) for i in sorted(tokens))


def _words(tokens: int) -> int:
    return (tokens + 31) // 32


def _lark(given: GrammarSource, spec: StructuredOutputsParams) -> Prepared:
    """Raises ConfigError, UnicodeEncodeError."""
    field, source, _ = given
    name = f"structured_outputs.{field}"
    if field == "calls":
        return _calls(source, spec)
    if field in ("json", "json_object"):
        return _json(parse_schema(source) if field == "json" else {"type": "object"}, spec)
    size = sum(map(len, source)) if field == "choice" else len(source)
    if size > _MAX_TEXT:
        raise ConfigError(f"{name}: {size} characters, more than {_MAX_TEXT}; give a smaller one")
    if field == "choice":
        if not source or not all(isinstance(choice, str) for choice in source):
            raise ConfigError(f"{name} is {list(source)!r:.80}: give one or more strings")
        # One terminal: alternatives that share a beginning are followed together.
        return Prepared("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, source)))
    if (repeats := sum(map(source.count, "?*+{"))) > _MAX_REPEATS:
        raise ConfigError(f"{name}: {repeats} repetitions, more than {_MAX_REPEATS}; give a smaller one")
    if field == "regex":
        return Prepared(f"start: {_terminal(ascii_classes(check_regex(source, name)))}")
    if _GBNF_RULE.search(source):
        return Prepared(_gbnf(source, name))
    if "%json" in source:
        raise ConfigError(f"{name}: %json is not supported; give the schema as structured_outputs.json")
    if found := _LARK_ATTRIBUTE.search(source):
        raise ConfigError(f"{name}: the rule attribute {found[1]} is not supported; leave it out")
    if "&" in _LARK_LITERAL.sub("", source):
        # Whether anything is left of two expressions can take the library for ever.
        raise ConfigError(f"{name}: the operator & is not supported; write what is left as one expression")
    return Prepared(source, cheap="~" not in source and "%regex" not in source)


def _terminal(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, '') or '(?:)'}/"  # an empty one would begin a comment


def _calls(given: CallGrammar, spec: StructuredOutputsParams) -> Prepared:
    """Rules are named by the number of their call."""

    def written(pieces: Iterable[Piece]) -> str:
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces)

    rules, cheap = [], True
    for i, (before, schema, after) in enumerate(given.calls):
        document = _json(parse_schema(schema), spec)
        rules += [f"c{i}: {written(before)} a{i} {written(after)}", document.form.replace("start:", f"a{i}:", 1)]
        cheap = cheap and document.cheap
    more = f"({written(given.between)} call){{0,{given.most - 1}}}" if given.most > 1 else ""
    start = f"start: {written(given.start)} call {more} {written(given.end)}"
    either = "call: " + " | ".join(f"c{i}" for i in range(len(given.calls)))
    return Prepared("\n".join((start, either, *rules)), cheap)


def _json(schema: Any, spec: StructuredOutputsParams) -> Prepared:
    """The documents of a schema, with what the request says of whitespace."""
    plain, cheap = rewrite_schema(schema, spec.disable_additional_properties)
    if plain is False:
        raise ConfigError("structured_outputs.json: false is satisfied by nothing; give another schema")
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES, "whitespace_flexible": not spec.disable_any_whitespace}
    name, pattern = "structured_outputs.whitespace_pattern", spec.whitespace_pattern
    if pattern is not None and spec.disable_any_whitespace:
        raise ConfigError(f"{name}: not together with disable_any_whitespace; leave out one of them")
    if not spec.disable_any_whitespace:
        options["whitespace_pattern"] = _WHITESPACE if pattern is None else check_regex(pattern, name)
    # At the end: the library takes it out by putting the last keyword into its place, and order matters to it.
    return Prepared(f"start: %json {json.dumps({**({} if plain is True else plain), 'x-guidance': options})}", cheap)


def _gbnf(text: str, name: str) -> str:
    """Lark of a GBNF grammar, without the parts that the library's converter does not get right."""
    from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RegexNode, gbnf_to_lark

    def check(node: ASTNode) -> None:
        if isinstance(node, RegexNode):
            if node.rx == ".":
                raise ConfigError(f"{name}: '.' is not supported in GBNF; write [^\\n] or another class")
            check_regex(node.rx, name)
        for child in node.children():
            check(child)

    try:
        for rule in GrammarParser().parse(text).values():
            check(rule)
        return gbnf_to_lark(text)
    except ConfigError:
        raise
    except Exception as e:  # the converter raises nothing more precise
        raise ConfigError(f"{name}: {clean(str(e))}; write it in Lark syntax") from e
