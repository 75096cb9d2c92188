"""A request's matcher over a backend that knows text only: the end of outputs and the tokens that are never text are
the same for all of them, and stand here."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.source import GrammarError
from graphllm.engine.structured.vocabulary import Vocabulary

MOST_BACK = 1 << 10  # drafts of a step


class State(Protocol):
    """Where a text stands, by one backend."""

    def take(self, token: int) -> bool:
        """Whether a token of text may come next; then it has."""

    def back(self, tokens: int) -> None:
        """Undo the last ``tokens`` that it took, at most `MOST_BACK`."""

    def write(self, row: NDArray[np.int32]) -> None:
        """Set the bits of the text tokens that may come next, and clear the bits of other text tokens."""

    def complete(self) -> bool:
        """Whether the text may end here."""


class TextMatcher:
    """A `Matcher` (graphllm.engine.structured.compiler)."""

    def __init__(self, vocabulary: Vocabulary, state: State) -> None:
        self._vocabulary, self._state = vocabulary, state
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether a stop token has ended the output."""
        return self._finished

    def advance(self, token: int) -> None:
        """Take the next token. Raises GrammarError when it may not come next."""
        texts = self._vocabulary.texts
        if self._finished:
            raise GrammarError(f"token {token} after the end of the output")
        if token in self._vocabulary.stop_ids:
            if not self._state.complete():
                raise GrammarError(f"stop token {token} before the end of the output")
            self._finished = True
        elif not (0 <= token < len(texts) and texts[token]):
            raise GrammarError(f"token {token} is no text")
        elif not self._state.take(token):
            raise GrammarError(f"token {token} ({texts[token]!r:.40}) may not come next")

    def rollback(self, tokens: int) -> None:
        """Undo the last ``tokens`` that `advance` took, a stop token among them."""
        ended = self._finished and tokens > 0
        self._finished = self._finished and not ended
        if tokens > ended:
            self._state.back(tokens - ended)

    def allow(self, row: NDArray[np.int32]) -> None:
        """Write what may come next. Raises GrammarError when nothing may."""
        if self._finished:
            row[:] = self._vocabulary.stop_row
            return
        self._state.write(row)
        row &= self._vocabulary.text_row
        if self._state.complete():
            row |= self._vocabulary.stop_row
        if not row.any():
            raise GrammarError("the grammar allows no token here")


def check_start(vocabulary: Vocabulary, state: State, field: str) -> None:
    """Raises ConfigError where no output is possible."""
    try:
        TextMatcher(vocabulary, state).allow(np.zeros_like(vocabulary.text_row))
    except GrammarError as e:
        raise ConfigError(f"structured_outputs.{field}: matches nothing ({e}); change it") from e
