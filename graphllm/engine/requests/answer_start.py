"""Where an answer begins that may have thinking before it, in ``<think>`` tags: stop strings are about the answer."""

from __future__ import annotations

_OPENS, _CLOSES = "<think>", "</think>"


class AnswerStart:
    """For one text as it grows. thinking: the text is within the thinking now, or was when the answer began."""

    def __init__(self, thinking: bool) -> None:
        """thinking: the text begins within it; else it may begin with its tag."""
        self.thinking = thinking
        self._seen = 0  # no closing tag begins before

    def find(self, text: str) -> int | None:
        """The place in the whole text so far; None while nobody knows."""
        if not self.thinking:
            begun = text.lstrip()
            self.thinking = begun.startswith(_OPENS)
            if not self.thinking:
                return None if _OPENS.startswith(begun) else 0
        at = text.find(_CLOSES, self._seen)
        self._seen = max(0, len(text) + 1 - len(_CLOSES))
        return None if at < 0 else at + len(_CLOSES)
