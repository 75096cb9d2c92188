"""Structured output by LM Format Enforcer: an automaton in Python, walked along the tree of tokens at each new state.

Of the library it takes the parser of expressions and the tree of tokens. Its parser of JSON is not used: it allows
documents that are none (1.e5, a comma before an end, 1e-5 as an integer), so schemas become expressions. A token that
holds a part of a character is never allowed, so only characters that are tokens, or in them, can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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
        automaton = _Automaton(_live(parser, self._tree), self._tree, self._texts, self._vocab, {})
        if parser.current_state not in automaton.live:
            raise ConfigError(
                f"structured_outputs.{field}: matches nothing, or needs a character that no token of the model is; "
                "use another backend"
            )
        return lambda: _State(parser, automaton)


class _Automaton(NamedTuple):
    """What the states of a grammar share. live: those of the expression from which there is an end. texts: of tokens.
    masks: of the states that some request has been in."""

    live: frozenset[int]
    tree: TokenizerPrefixTree
    texts: dict[int, str]
    vocab: int
    masks: dict[int, NDArray[np.int32]]


class _State:
    def __init__(self, parser: RegexParser, automaton: _Automaton) -> None:
        self._parser, self._automaton = parser, automaton

    def take(self, token: int) -> bool:
        parser = self._parser
        for char in self._automaton.texts.get(token, ""):
            if char not in parser.get_allowed_characters():
                return False
            parser = parser.add_character(char)
        if token not in self._automaton.texts or parser.current_state not in self._automaton.live:
            return False
        self._parser = parser
        return True

    def write(self, row: NDArray[np.int32]) -> None:
        state, automaton = self._parser.current_state, self._automaton
        if state not in automaton.masks:
            found: list[int] = []
            _collect(self._parser, automaton.tree.root, automaton.live, found)
            automaton.masks[state] = bits(found, automaton.vocab)
        row[:] = automaton.masks[state]

    def complete(self) -> bool:
        return self._parser.can_end()


def _collect(parser: RegexParser, node: TokenizerPrefixTreeNode, live: frozenset[int], found: list[int]) -> None:
    """The tokens in a part of the tree that lead to a live state."""
    if parser.current_state in live:
        found += node.tokens
    for char in node.children.keys() & set(parser.get_allowed_characters()):
        _collect(parser.add_character(char), node.children[char], live, found)


def _live(parser: RegexParser, tree: TokenizerPrefixTree) -> frozenset[int]:
    """The states from which characters that are tokens lead to an end."""
    fsm, others = parser.context.pattern, parser.context.anything_else_characters
    alone = {char for char, node in tree.root.children.items() if node.tokens}
    usable = {
        key
        for key, symbols in fsm.alphabet.by_transition.items()
        if any(symbol in alone if isinstance(symbol, str) else not alone.isdisjoint(others) for symbol in symbols)
    }
    before: dict[int, set[int]] = {}
    for state, moves in fsm.map.items():
        for key, after in moves.items():
            if key in usable:
                before.setdefault(after, set()).add(state)
    live = set(fsm.finals)
    found = list(live)
    while found:
        new = before.get(found.pop(), set()) - live
        live |= new
        found += new
    return frozenset(live)


def _whole(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return ""
