"""How likely guesses go on that repeat what was said before, by how long they have done so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LONGEST = 8  # tokens of a run, of longer ones as well
_DOUBT, _KEPT = 4, 64  # tokens for which what is believed at first counts, and for which all that was seen does
ENDED = -1  # the run after a text's last token: the guess counts as wrong, since nothing is gained after the end
_OFTEN = 16  # steps between two updates of what is learned

_Table = list[list[float]]


class MatchLengths:
    """How often a guess from the text is right, by the length of its match.

    A guess rests on a run: the number of a sequence's last tokens that occurred in the text before; 0 without a guess.
    A longer run is likelier to go on. Its likelihood is learned with every token, verified or not: nothing need be
    tried.
    """

    def __init__(self) -> None:
        # By length of the run: how often the next token was the guessed one (before any is seen: as for a coin of
        # which nothing is known but that it fell so all these times), and for how many tokens that counts.
        lengths = np.arange(_LONGEST + 1)
        self._goes_on, self._seen = lengths / (lengths + 1), np.full(_LONGEST + 1, float(_DOUBT))
        # Where a run has ended, or there was none: how often the next guess rests on one of each length.
        self._begins, self._begins_seen = (lengths == 0).astype(float), float(_DOUBT)
        self._expected: dict[tuple[int, int], _Table] = {}
        # Steps that wait for the next update, each by sequence. _stepped: runs before one more token and after it.
        # _verified: runs before several tokens, how many drafts were right, whether the next was wrong, and runs after.
        self._stepped: list[tuple[np.ndarray, np.ndarray]] = []
        self._verified: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def expected(self, runs: Sequence[int], ahead: Sequence[int], count: int) -> float:
        """Of ``count`` drafts of a sequence, how many will be right on average. runs: on which the newest guesses rest
        that are known; ahead: how many tokens later the drafts begin, if all between them are guessed right."""
        key = count, max(ahead)
        table = self._expected.get(key)
        if table is None:
            table = self._expected[key] = self._table(*key)
        return sum([table[min(run, _LONGEST)][a] for run, a in zip(runs, ahead, strict=True)]) / len(runs)

    def _table(self, count: int, most: int) -> _Table:
        """By length of a run, and tokens until the drafts begin."""
        rates = self._goes_on[np.minimum(np.arange(1, _LONGEST + most + count + 1), _LONGEST)].clip(0.02, 0.98)
        reached = np.concatenate([[1.0], np.cumprod(rates)])  # from a run of 1: how likely it comes to each length
        places = np.arange(_LONGEST)[:, None] + np.arange(most + 1)  # by length - 1, and tokens
        sums = np.cumsum(reached)
        right = (sums[places + count] - sums[places]) / reached[:_LONGEST, None]
        still = reached[places] / reached[:_LONGEST, None]
        anew = self._begins[1:] @ right[:, 0]
        without = np.full((1, most + 1), anew)
        without[0, 0] = 0.0
        table: _Table = np.concatenate([without, right + (1 - still) * anew]).tolist()
        return table

    def stepped(self, before: np.ndarray, now: np.ndarray) -> None:
        """A step gave each sequence one token. before, now: its runs before that token and after it."""
        self._stepped.append((before, now))
        if len(self._stepped) + len(self._verified) >= _OFTEN:
            self._learn()

    def verified(self, before: np.ndarray, right: np.ndarray, missed: np.ndarray, now: np.ndarray) -> None:
        """A step has verified each sequence's guess.

        before, now: as in `stepped`.
        right: tokens of the guess that were right.
        missed: whether the next token was wrong; unknown where all were right.
        """
        self._verified.append((before, right, missed, now))
        if len(self._stepped) + len(self._verified) >= _OFTEN:
            self._learn()

    def _learn(self) -> None:
        steps = [*self._verified]
        if self._stepped:
            before, now = (np.concatenate(part) for part in zip(*self._stepped, strict=True))
            # A run that is longer by a token: that was the guessed one.
            right = (before > 0) & ((now == before + 1) | ((before >= _LONGEST) & (now >= _LONGEST)))
            steps.append((before, right.astype(np.int32), ~right, now))
        before, right, missed, now = (np.concatenate(part) for part in zip(*steps, strict=True))
        self._stepped, self._verified = [], []
        self._expected.clear()

        begun = now[(missed | (before == 0)) & (now != ENDED)]
        if k := len(begun):
            self._begins_seen = max(min(self._begins_seen + k, _KEPT), k)
            counts = np.bincount(np.minimum(begun, _LONGEST), minlength=_LONGEST + 1)
            self._begins += (counts - k * self._begins) / self._begins_seen
        there = before > 0
        if np.count_nonzero(there):
            first = np.minimum(before[there], _LONGEST)
            good = first + right[there]
            tried = good + missed[there]
            size = int(tried.max()) + 2
            start = np.bincount(first, minlength=size)
            hits = _up_to_longest(np.cumsum(start - np.bincount(good, minlength=size)))
            tries = _up_to_longest(np.cumsum(start - np.bincount(tried, minlength=size)))
            self._seen = np.maximum(np.minimum(self._seen + tries, _KEPT), tries)
            self._goes_on += (hits - tries * self._goes_on) / self._seen


def _up_to_longest(counts: np.ndarray) -> np.ndarray:
    """By length of runs; longer runs count with the longest."""
    found = np.zeros(_LONGEST + 1)
    part = counts[: _LONGEST + 1]
    found[: len(part)] = part
    found[_LONGEST] += counts[_LONGEST + 1 :].sum()
    return found
