"""The compilers of backends that know text only and take a part of what may be asked for: `TextCompiler`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graphllm.config import ConfigError
from graphllm.engine.structured.backends.matcher import State, TextMatcher, check_start
from graphllm.engine.structured.backends.regexes import literal, plain_regex
from graphllm.engine.structured.backends.schema_regex import REGEX_SHAPES, schema_regex
from graphllm.engine.structured.backends.subset import reduced_schema
from graphllm.engine.structured.compiler import CachingCompiler, Prepared
from graphllm.engine.structured.schemas.schema import parse_schema
from graphllm.engine.structured.source import GrammarSource, UnsupportedError
from graphllm.engine.structured.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from graphllm.config.requests.sampling_params import StructuredOutputsParams

_MAX_CHOICES = 200_000  # characters of them all


class TextGrammar:
    """A `Grammar` (graphllm.engine.structured.compiler). start: makes a state at the start of the output."""

    def __init__(self, vocabulary: Vocabulary, start: Callable[[], State]) -> None:
        self._vocabulary, self._start = vocabulary, start

    def matcher(self) -> TextMatcher:
        """One at the start of the output."""
        return TextMatcher(self._vocabulary, self._start())


class TextCompiler(CachingCompiler[TextGrammar]):
    """Says of each constraint what it is for the backend; the backend makes states of it."""

    _vocabulary: Vocabulary | None = None

    @abstractmethod
    def load(self, vocabulary: Vocabulary) -> None:
        """Make what the library needs of the tokens, once."""

    @abstractmethod
    def schema(self, reduced: Any, spaces: bool) -> Any:
        """The form of the documents of a schema in `shapes`. spaces: whether there may be any in it."""

    @abstractmethod
    def regex(self, plain: str) -> Any:
        """The form of an expression (`plain_regex`)."""

    def grammar(self, text: str) -> Any:
        """The form of a context-free grammar."""
        raise UnsupportedError("grammar", "a context-free grammar", kind="field")

    @abstractmethod
    def start(self, field: str, form: Any) -> Callable[[], State]:
        """Compile a form. Raises ConfigError."""

    def prepare(self, source: GrammarSource, spec: StructuredOutputsParams) -> Prepared:
        """Raises ConfigError, UnsupportedError."""
        assert self.shapes is not None
        if spec.whitespace_pattern is not None:
            raise UnsupportedError("whitespace_pattern", "another pattern of whitespace")
        spaces = not spec.disable_any_whitespace
        match source.field:
            case "json":
                schema = parse_schema(source.content)
                reduced = reduced_schema(schema, spec.disable_additional_properties, self.shapes)
                return Prepared(self.schema(reduced, spaces), cheap=False)
            case "json_object":
                reduced = reduced_schema({"type": "object"}, False, self.shapes)
                return Prepared(self.schema(reduced, spaces))
            case "choice":
                return Prepared(self.regex(_choice(source.content)))
            case "regex":
                return Prepared(self.regex(plain_regex(source.content, "regex")), cheap=False)
            case _:
                return Prepared(self.grammar(source.content), cheap=False)

    def build(self, field: str, form: Any, spec: StructuredOutputsParams) -> TextGrammar:
        """Raises ConfigError for what matches nothing, too."""
        vocabulary = self._loaded()
        start = self.start(field, form)
        check_start(vocabulary, start(), field)
        return TextGrammar(vocabulary, start)

    def _loaded(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                vocabulary = read_vocabulary(self._folder, self._vocab, self.usable_stops())
                self.load(vocabulary)
                self._vocabulary = vocabulary
            return self._vocabulary


class RegexCompiler(TextCompiler):
    """For a backend that knows regular expressions only: every form is one, also that of a schema."""

    fields = frozenset(("json", "json_object", "choice", "regex"))
    shapes = REGEX_SHAPES

    def schema(self, reduced: Any, spaces: bool) -> Any:
        """The expression of all documents."""
        return schema_regex(reduced, spaces)

    def regex(self, plain: str) -> Any:
        """As it stands."""
        return plain


def _choice(choices: Sequence[str]) -> str:
    size = sum(map(len, choices))
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"structured_outputs.choice is {list(choices)!r:.80}: give one or more strings")
    if size > _MAX_CHOICES:
        raise ConfigError(f"structured_outputs.choice: {size} characters, more than {_MAX_CHOICES}; give less")
    return "|".join(map(literal, choices))
