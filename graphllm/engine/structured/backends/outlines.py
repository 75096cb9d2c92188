"""Structured output by outlines-core: an expression, compiled with all tokens into one table of states.

To compile takes long and much memory for large expressions and vocabularies; each step is a look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphllm.config import ConfigError
from graphllm.engine.structured.backends.matcher import MOST_BACK
from graphllm.engine.structured.backends.texts import RegexCompiler
from graphllm.engine.structured.source import clean
from graphllm.engine.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import outlines_core

# Without "$" the library leaves out texts that a shorter one is a beginning of ("aaaa" of "(a[ab])+"), and with it, it
# refuses expressions of the empty text. So all begin with a character that is taken before the output begins.
_MARK = "\ue000"


class OutlinesCompiler(RegexCompiler):
    """https://github.com/dottxt-ai/outlines-core"""

    name = "outlines"
    package = "outlines_core"
    _tokens: outlines_core.Vocabulary
    _mark: int  # a token that no model has

    def load(self, vocabulary: Vocabulary) -> None:
        """Make its vocabulary, of the tokens that each text has."""
        import outlines_core

        ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(vocabulary.texts):
            if text:
                ids.setdefault(text, []).append(token)
        self._mark = len(vocabulary.texts)
        ids.setdefault(_MARK.encode(), []).append(self._mark)
        self._tokens = outlines_core.Vocabulary(min(vocabulary.stop_ids), ids)

    def start(self, field: str, form: Any) -> Callable[[], _State]:
        """Raises ConfigError for what the library cannot compile."""
        import outlines_core

        try:
            index = outlines_core.Index(f"{_MARK}(?:{form})$", self._tokens)
        except ValueError as e:
            raise ConfigError(f"structured_outputs.{field}: {clean(str(e))}; change it") from e
        return lambda: _State(index, self._mark)


class _State:
    def __init__(self, index: outlines_core.Index, mark: int) -> None:
        import outlines_core

        self._guide = outlines_core.Guide(index, max_rollback=MOST_BACK)
        self._guide.advance(mark, return_tokens=False)
        self._row = np.zeros(mark // 32 + 1, np.int32)  # the library's, with the mark

    def take(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def back(self, tokens: int) -> None:
        self._guide.rollback_state(tokens)

    def write(self, row: NDArray[np.int32]) -> None:
        self._guide.write_mask_into(self._row.ctypes.data, self._row.size, self._row.itemsize)
        row[:] = self._row[: row.size]

    def complete(self) -> bool:
        return self._guide.is_finished()
