"""Structured output by outlines-core: an expression, compiled with all tokens into one table of states.

To compile takes long and much memory for large expressions and vocabularies; each step is a look-up.
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
from graphllm.engine.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import outlines_core


class OutlinesCompiler(TextCompiler):
    """https://github.com/dottxt-ai/outlines-core"""

    name = "outlines"
    package = "outlines_core"
    fields = frozenset(("json", "json_object", "choice", "regex"))
    shapes = REGEX_SHAPES
    _tokens: outlines_core.Vocabulary

    def load(self, vocabulary: Vocabulary) -> None:
        """Make its vocabulary, of the tokens that each text has."""
        import outlines_core

        ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(vocabulary.texts):
            if text:
                ids.setdefault(text, []).append(token)
        self._tokens = outlines_core.Vocabulary(min(vocabulary.stop_ids), ids)

    def schema(self, reduced: Any, spaces: bool) -> Any:
        """A form is an expression."""
        return schema_regex(reduced, spaces)

    def regex(self, plain: str) -> Any:
        """As it stands."""
        return plain

    def start(self, field: str, form: Any) -> Callable[[], _State]:
        """Raises ConfigError for what the library cannot compile."""
        import outlines_core

        try:
            index = outlines_core.Index(f"(?:{form})", self._tokens)
        except ValueError as e:
            raise ConfigError(f"structured_outputs.{field}: {clean(str(e))}; change it") from e
        return lambda: _State(index)


class _State:
    def __init__(self, index: outlines_core.Index) -> None:
        import outlines_core

        self._guide = outlines_core.Guide(index, max_rollback=0)

    def take(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def write(self, row: NDArray[np.int32]) -> None:
        self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)

    def complete(self) -> bool:
        return self._guide.is_finished()
