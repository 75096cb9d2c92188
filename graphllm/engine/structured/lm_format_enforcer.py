"""Structured output by LM Format Enforcer: an automaton in Python, walked along the tree of tokens at each new state.

Of the library it takes the parser of expressions and the tree of tokens. Its parser of JSON is not used: it allows
documents that are none (1.e5, a comma before an end, 1e-5 as an integer), so schemas become expressions. A token that
holds a part of a character is never allowed, so only characters that are tokens, or in them, can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.schema_regex import REGEX_SHAPES, schema_regex
from graphllm.engine.structured.source import clean
from graphllm.engine.structured.texts import TextCompiler
from graphllm.engine.structured.vocabulary import Vocabulary, bits

if TYPE_CHECKING:
    from lmformatenforcer.regexparser import RegexParser
    from lmformatenforcer.tokenizerprefixtree import TokenizerPrefixTree, TokenizerPrefixTreeNode


class LMFormatEnforcerCompiler(TextCompiler):
    """https://github.com/noamgat/lm-format-enforcer"""

    name = "lm-format-enforcer"
    package = "lmformatenforcer"
    fields = frozenset(("json", "json_object", "choice", "regex"))
    shapes = REGEX_SHAPES

    def load(self, vocabulary: Vocabulary) -> None:
        """Make its tree of tokens; a second for large vocabularies."""
        from lmformatenforcer.tokenizerprefixtree import TokenizerPrefixTree

        self._texts = {token: text for token, text in enumerate(map(_whole, vocabulary.texts)) if text}
        self._tree = TokenizerPrefixTree(
            [(token, text, False) for token, text in self._texts.items()], use_bitmask=False, vocab_size=self._vocab
        )

    def schema(self, reduced: Any, spaces: bool) -> Any:
        """A form is an expression."""
        return schema_regex(reduced, spaces)

    def regex(self, plain: str) -> Any:
        """As it stands."""
        return plain

    def start(self, field: str, form: Any) -> Callable[[], _State]:
        """Raises ConfigError for what the library cannot compile."""
        from lmformatenforcer import CharacterLevelParserConfig
        from lmformatenforcer.regexparser import RegexParser

        config = CharacterLevelParserConfig(alphabet="".join(sorted(self._tree.root.children)))
        try:
            parser = RegexParser(form, config)
        except Exception as e:  # the library raises nothing more precise
            raise ConfigError(f"structured_outputs.{field}: {clean(str(e))}; change it") from e
        masks: dict[int, NDArray[np.int32]] = {}
        return lambda: _State(parser, self._tree, self._texts, masks, self._vocab)


class _State:
    """masks: of the automaton's states that some request has been in."""

    def __init__(
        self,
        parser: RegexParser,
        tree: TokenizerPrefixTree,
        texts: dict[int, str],
        masks: dict[int, NDArray[np.int32]],
        vocab: int,
    ) -> None:
        self._parser, self._tree, self._texts, self._masks, self._vocab = parser, tree, texts, masks, vocab

    def take(self, token: int) -> bool:
        parser = self._parser
        for char in self._texts.get(token, ""):
            if char not in parser.get_allowed_characters():
                return False
            parser = parser.add_character(char)
        self._parser = parser
        return token in self._texts

    def write(self, row: NDArray[np.int32]) -> None:
        state = self._parser.current_state
        if state not in self._masks:
            found: list[int] = []
            _collect(self._parser, self._tree.root, found)
            self._masks[state] = bits(found, self._vocab)
        row[:] = self._masks[state]

    def complete(self) -> bool:
        return self._parser.can_end()


def _collect(parser: RegexParser, node: TokenizerPrefixTreeNode, found: list[int]) -> None:
    found += node.tokens
    for char in node.children.keys() & set(parser.get_allowed_characters()):
        _collect(parser.add_character(char), node.children[char], found)


def _whole(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return ""
