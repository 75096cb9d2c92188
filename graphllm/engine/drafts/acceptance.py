"""How often drafts were right, and how many of them the next step should verify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from graphllm.engine.drafts.match_lengths import MatchLengths

# Of the newest step in the running means: one of what a text is like, and one of whether it repeats itself just now.
_MEMORY = np.array([0.05, 0.5])
_PRIOR = (1 / 30, 1 / 480)  # what a draft costs, of a plain step: for any step, and more for each sequence
_LEAST = 0.25  # right drafts of a sequence for which a step verifies: fewer do not pay, whatever was measured
_PROBE = 16  # of steps that would not pay, one verifies
_PLAIN = 64  # of steps that pay, two in a row do not verify, so that what such a step takes stays known
# Weight of a new plain step's time in the mean, where it is shorter and where it is longer: the first steps after a
# prompt take long. Below, the same for the time of a step that verifies, in plain steps.
_FALL, _RISE = 0.5, 0.02
_LESS, _MORE = 0.3, 0.1


class Acceptance:
    """Of the drafts that were verified.

    most: drafts of a sequence in a step.
    off_above: steps of more sequences verify nothing; None: as it pays.
    drafts: verified so far; all drafts of a sequence in a step count as one.
    draft_tokens: tokens of these drafts.
    by_position: right tokens at each place.
    runs: how guesses that the device looks up go on.
    """

    def __init__(self, most: int, off_above: int | None = None) -> None:
        self.drafts = self.draft_tokens = 0
        self.by_position = np.zeros(most, dtype=np.int64)
        self.runs = MatchLengths()
        self._off_above = off_above
        # By memory: of the drafts at each place, how many were right with all before them, lately.
        self._rates = np.ones((len(_MEMORY), most))
        # By about how many sequences: seconds of a step that verifies nothing, and how many of these one of a query
        # length takes.
        self._plain: dict[int, float] = {}
        self._costs: dict[tuple[int, int], float] = {}
        self._measured: Counter[tuple[int, int]] = Counter()
        self._unknown: set[int] = set()  # where the former is not known, and something was verified
        self._before = 0, 0  # query length of the last step, and about how many sequences it had
        self._passed = self._verified = 0

    def off(self, sequences: int) -> bool:
        """Whether a step of ``sequences`` verifies nothing, whatever drafts there are."""
        return self._off_above is not None and sequences > self._off_above

    def best(
        self,
        sequences: int,
        lengths: Sequence[int],
        share: float = 1.0,
        runs: Sequence[int] | None = None,
        ahead: Sequence[int] = (),
    ) -> int:
        """How many tokens of each sequence the next step should compute: one of the lengths, ascending and above 1, or
        1. That is what gives the most tokens for its time: of the share of the sequences that have drafts, as many as
        were right lately; of guesses that the device looks up, as many as are expected of the sequences' runs (see
        `MatchLengths.expected`). What does not pay is tried now and then, since texts and times change, and so are
        steps without drafts where those pay, since what they gain is measured by them."""
        if not lengths or self.off(sequences):
            return 1
        if runs is None:
            right = [share * float(self._rates[:, : q - 1].sum(axis=1).max()) for q in lengths]
        else:
            right = [self.runs.expected(runs, ahead, q - 1) for q in lengths]
        speeds = [(1 + r) / self._cost(q, sequences) for q, r in zip(lengths, right, strict=True)]
        fastest = speeds.index(max(speeds))
        if speeds[fastest] > 1 and right[fastest] > _LEAST:
            self._verified = (self._verified + 1) % _PLAIN
            about = sequences.bit_length()
            return 1 if about in self._unknown or self._verified >= _PLAIN - 2 else lengths[fastest]
        # What comes of runs is known; with those that are likely to go on it is tried what verifying takes.
        if runs is not None and right[fastest] < min(1, (lengths[fastest] - 1) / 2):
            return 1
        self._passed = (self._passed + 1) % _PROBE
        return lengths[fastest] if self._passed == 0 else 1

    def _cost(self, query_len: int, sequences: int) -> float:
        """Of a step that verifies, in plain steps: as measured, or as usual."""
        each, more = _PRIOR
        usual = 1 + (query_len - 1) * (each + more * sequences)
        return self._costs.get((query_len, sequences.bit_length()), usual)

    def timed(self, query_len: int, sequences: int, seconds: float) -> None:
        """Learn the time of a step in which each sequence computed ``query_len`` tokens."""
        about = sequences.bit_length()
        before, self._before = self._before, (query_len, about)
        plain = self._plain.get(about)
        if query_len > 1 and plain is None:
            self._unknown.add(about)
        elif query_len > 1 and plain is not None:
            key = query_len, about
            self._measured[key] += 1
            cost = self._cost(query_len, sequences)
            first = 1 / (1 + self._measured[key])
            measured = min(max(seconds / plain, 1.0), query_len)
            self._costs[key] = _moved(cost, measured, max(_LESS, first), max(_MORE, first))
        elif plain is None or before == (1, about):  # a step after a verifying one waits longer for the host
            self._plain[about] = seconds if plain is None else _moved(plain, seconds, _FALL, _RISE)
            self._unknown.discard(about)

    def learn(self, kept: np.ndarray, drafted: np.ndarray) -> None:
        """A step's result: how many tokens were kept of each sequence, one at least, and how many drafts each had."""
        if np.count_nonzero(drafted) < len(drafted):
            kept, drafted = kept[drafted > 0], drafted[drafted > 0]
        if not len(kept):
            return
        right = np.minimum(kept - 1, drafted)
        places = np.arange(drafted.max())
        had = (drafted[:, None] > places).sum(axis=0)
        good = (right[:, None] > places).sum(axis=0)
        self.drafts += len(kept)
        self.draft_tokens += int(drafted.sum())
        self.by_position[: len(places)] += good
        self._rates[:, : len(places)] += _MEMORY[:, None] * (good / had - self._rates[:, : len(places)])


def _moved(mean: float, value: float, fall: float, rise: float) -> float:
    return mean + (fall if value < mean else rise) * (min(value, 2 * mean) - mean)
