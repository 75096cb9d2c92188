"""Texts that an output must not have: which tokens would complete one of them, whatever tokens it is made of."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphllm.engine.structured.vocabulary import bits

if TYPE_CHECKING:
    from graphllm.engine.requests.text import Tokenizer


class TokenTexts:
    """Texts of tokens, to search in.

    texts: the bytes of each token; empty for a token that adds no text.
    special: special tokens, by how they are written.
    """

    def __init__(self, texts: Sequence[bytes], special: dict[str, int] | None = None) -> None:
        self.texts, self.special = texts, special or {}
        self._order = sorted((id for id, text in enumerate(texts) if text), key=texts.__getitem__)
        self._all = b"".join(texts)
        self._starts = np.cumsum([0, *map(len, texts)])

    @staticmethod
    def of(tokenizer: Tokenizer, vocab: int) -> TokenTexts:
        """Texts of the tokens that a model with a vocabulary of ``vocab`` may give."""
        special = {text: id for text, id in tokenizer.special_tokens.items() if id < vocab}
        hidden, known = {*special.values(), *tokenizer.stop_ids}, min(vocab, tokenizer.vocab_size)
        return TokenTexts([b"" if id in hidden else tokenizer.token_bytes[id] for id in range(known)], special)

    def beginning(self, text: bytes) -> list[int]:
        """Tokens that begin with this text."""
        key = self.texts.__getitem__
        first = bisect.bisect_left(self._order, text, key=key)
        end = bisect.bisect_left(self._order, True, first, key=lambda id: not key(id).startswith(text))
        return self._order[first:end]

    def having(self, text: bytes) -> list[int]:
        """Tokens that have this text in them."""
        found, at = list[int](), self._all.find(text)
        while at >= 0:
            token = int(np.searchsorted(self._starts, at, side="right")) - 1
            end = int(self._starts[token + 1])
            inside = at + len(text) <= end
            if inside:
                found.append(token)
            at = self._all.find(text, end if inside else at + 1)
        return found


class BadWords:
    """The words of one request. A word is looked for in the text, also within others and over the borders of tokens; a
    special token is forbidden by its name."""

    def __init__(self, texts: TokenTexts, words: Iterable[str]) -> None:
        self._texts = texts
        ids, self._words = set[int](), list[bytes]()
        for word in words:
            if (special := texts.special.get(word)) is not None:
                ids.add(special)
            else:
                self._words.append(word.encode())
                ids.update(texts.having(self._words[-1]))
        self._whole, self._longest = ids, max(map(len, self._words), default=0)
        self._begun: dict[int, list[tuple[bytes, bytes]]] = {}  # by its last byte, a word's beginning, and its rest
        for text in self._words:
            for count in range(1, len(text)):
                self._begun.setdefault(text[count - 1], []).append((text[:count], text[count:]))
        self._others: dict[bytes, NDArray[np.int32]] = {}  # by the rest of a word, the tokens that do not complete it

    def forbid(self, row: NDArray[np.int32], output: Sequence[int]) -> None:
        """Clear the bits of tokens that would complete a word after that output."""
        self._take(row, b"")
        text = self._tail(output)
        for begun, rest in self._begun.get(text[-1], ()) if text else ():
            if text.endswith(begun):
                self._take(row, rest)

    def _take(self, row: NDArray[np.int32], rest: bytes) -> None:
        """The tokens that begin with the rest of a word; those that have a whole one where that is empty."""
        if rest not in self._others:
            ids = self._texts.beginning(rest) if rest else self._whole
            self._others[rest] = ~bits(ids, 32 * len(row))
        row &= self._others[rest]

    def _tail(self, output: Sequence[int]) -> bytes:
        """The end of the output's text, as far as a word may have begun there."""
        text, texts = b"", self._texts.texts
        for token in reversed(output):
            if len(text) >= self._longest - 1:
                break
            text = (texts[token] if token < len(texts) else b"") + text
        return text
