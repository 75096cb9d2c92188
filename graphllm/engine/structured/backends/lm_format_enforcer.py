"""Structured output by LM Format Enforcer: an automaton in Python, walked along the tree of tokens at each new state.

Of the library it takes the parser of expressions and the tree of tokens. Its parser of JSON is not used: it allows
documents that are none (1.e5, a comma before an end, 1e-5 as an integer), so schemas become expressions. A token that
holds a part of a character is never allowed, so only characters that are tokens, or in them, can be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.backends.matcher import MOST_BACK
from graphllm.engine.structured.backends.texts import RegexCompiler
from graphllm.engine.structured.source import clean
from graphllm.engine.structured.vocabulary import Vocabulary, bits

if TYPE_CHECKING:
    from lmformatenforcer.regexparser import RegexParser
    from lmformatenforcer.tokenizerprefixtree import TokenizerPrefixTree


class LMFormatEnforcerCompiler(RegexCompiler):
    """https://github.com/noamgat/lm-format-enforcer"""

    name = "lm-format-enforcer"
    package = "lmformatenforcer"

    def load(self, vocabulary: Vocabulary) -> None:
        """Make its tree of tokens; a second for large vocabularies."""
        from lmformatenforcer.tokenizerprefixtree import TokenizerPrefixTree

        self._texts = {token: text for token, text in enumerate(map(_whole, vocabulary.texts)) if text}
        self._alphabet = "".join(sorted({char for text in self._texts.values() for char in text}))
        self._tree = TokenizerPrefixTree(
            [(token, text, False) for token, text in self._texts.items()], use_bitmask=False, vocab_size=self._vocab
        )

    def start(self, field: str, form: Any) -> Callable[[], _State]:
        """Raises ConfigError for what the library cannot compile."""
        from lmformatenforcer import CharacterLevelParserConfig
        from lmformatenforcer.regexparser import RegexParser

        try:
            parser = RegexParser(form, CharacterLevelParserConfig(alphabet=self._alphabet))
        except Exception as e:  # the library raises nothing more precise
            raise ConfigError(f"structured_outputs.{field}: {clean(str(e))}; change it") from e
        automaton = _automaton(parser, self._tree, self._texts, self._vocab)
        if parser.context.pattern.initial not in automaton.moves:
            raise ConfigError(
                f"structured_outputs.{field}: matches nothing, or needs a character that no token of the model is; "
                "use another backend"
            )
        return lambda: _State(automaton, parser.context.pattern.initial)


class _Automaton(NamedTuple):
    """What the states of a grammar share.

    keys: of characters, in moves.
    moves: between states that can reach an end by characters that are tokens, so that every state has a continuation.
    ends: where the text may end.
    texts: of tokens.
    masks: of the states that some request has been in.
    """

    keys: dict[str, int]
    moves: dict[int, dict[int, int]]
    ends: frozenset[int]
    tree: TokenizerPrefixTree
    texts: dict[int, str]
    vocab: int
    masks: dict[int, NDArray[np.int32]]

    def mask(self, start: int) -> NDArray[np.int32]:
        """The tokens that may come next. It walks along the tree itself: by the parser's own methods, which make an
        object and a set of all characters at each node, that takes seconds for large vocabularies."""
        if start not in self.masks:
            found: list[int] = []
            pending = [(self.tree.root, start)]
            while pending:
                node, state = pending.pop()
                found += node.tokens
                moves = self.moves[state]
                for char, child in node.children.items():
                    if (after := moves.get(self.keys[char])) is not None:
                        pending.append((child, after))
            self.masks[start] = bits(found, self.vocab)
        return self.masks[start]


class _State:
    def __init__(self, automaton: _Automaton, state: int) -> None:
        self._automaton, self._state = automaton, state
        self._before: deque[int] = deque(maxlen=MOST_BACK)

    def take(self, token: int) -> bool:
        state: int | None = self._state
        for char in self._automaton.texts.get(token, ()):
            state = None if state is None else self._automaton.moves[state].get(self._automaton.keys[char])
        if state is None or token not in self._automaton.texts:
            return False
        self._before.append(self._state)
        self._state = state
        return True

    def back(self, tokens: int) -> None:
        for _ in range(tokens):
            self._state = self._before.pop()

    def write(self, row: NDArray[np.int32]) -> None:
        row[:] = self._automaton.mask(self._state)

    def complete(self) -> bool:
        return self._state in self._automaton.ends


def _automaton(parser: RegexParser, tree: TokenizerPrefixTree, texts: dict[int, str], vocab: int) -> _Automaton:
    fsm = parser.context.pattern
    named = {char: key for key, chars in fsm.alphabet.by_transition.items() for char in chars if isinstance(char, str)}
    others = next((key for key, chars in fsm.alphabet.by_transition.items() if not named.keys() >= {*chars}), -1)
    keys = {char: named.get(char, others) for char in parser.config.alphabet}
    single = {keys[char] for char, node in tree.root.children.items() if node.tokens}
    before: dict[int, list[int]] = {}
    for state, moves in fsm.map.items():
        for key, after in moves.items():
            if key in single:
                before.setdefault(after, []).append(state)
    live, pending = set(fsm.finals), list(fsm.finals)
    while pending:
        new = set(before.get(pending.pop(), ())) - live
        live |= new
        pending += new
    moves = {s: {key: after for key, after in fsm.map.get(s, {}).items() if after in live} for s in live}
    return _Automaton(keys, moves, frozenset(fsm.finals), tree, texts, vocab, {})


def _whole(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return ""
