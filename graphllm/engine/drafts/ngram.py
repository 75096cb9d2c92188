"""Prompt lookup on the host: what followed the last tokens where they stood before in the same text."""

from __future__ import annotations

from collections.abc import Sequence

from graphllm.config import ConfigError, SpeculationConfig


class NgramProposer:
    """Looks for the longest run of last tokens, of ngram_proposer_min to ngram_proposer_max, and takes what followed
    the latest place where it stood; where that reaches the end, it goes on with its own guess. As the op `ngram_drafts`
    does on the device, but without a limit of the text's length. Source: prompt lookup decoding (Saxena 2023)."""

    def __init__(self, settings: SpeculationConfig) -> None:
        self._most, self._fewest = settings.ngram_proposer_max, settings.ngram_proposer_min
        if self._fewest > self._most:
            raise ConfigError(f"ngram_proposer_min is {self._fewest}: it is more than ngram_proposer_max, {self._most}")
        self._texts: dict[str, tuple[list[int], dict[tuple[int, ...], int]]] = {}

    def propose(self, id: str, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
        """See `Proposer`."""
        text, ends = self._texts.setdefault(id, ([], {}))
        new = [*prompt[len(text) :], *output[max(0, len(text) - len(prompt)) :]]
        for token in new:
            # Runs are entered when something follows them: the text's own end is not found.
            for n in range(self._fewest, min(self._most, len(text)) + 1):
                ends[tuple(text[-n:])] = len(text)
            text.append(token)
        for n in range(min(self._most, len(text)), self._fewest - 1, -1):
            at = ends.get(tuple(text[-n:]))
            if at is not None:
                period = len(text) - at
                return [text[at + i % period] for i in range(count)]
        return []

    def end(self, id: str, output: Sequence[int]) -> None:
        """See `Proposer`."""
        self._texts.pop(id, None)
