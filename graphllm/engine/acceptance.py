"""How often drafts were right, and how many of them the next step should verify."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Of the newest step in the running means: one of what a text is like, and one of whether it repeats itself just now.
_MEMORY = np.array([0.05, 0.5])
_PRIOR = (1 / 30, 1 / 480)  # what a draft costs, of a plain step: for any step, and more for each sequence
_PROBE = 16  # of steps that would not pay, one verifies
_PLAIN = 64  # of steps that pay, one does not verify, so that what such a step takes stays known
_FALL, _RISE = 0.5, 0.02  # of a step's time in its mean: the first ones take long, so a shorter one counts for more


class Acceptance:
    """Of the drafts that were verified.

    most: drafts of a sequence in a step. off_above: sequences of a step above which none are verified, None as it pays.
    drafts, draft_tokens: verified so far; of a sequence in a step, and their tokens. by_position: how many were right
    at each place.
    """

    def __init__(self, most: int, off_above: int | None = None) -> None:
        self.drafts = self.draft_tokens = 0
        self.by_position = np.zeros(most, dtype=np.int64)
        self._off_above = off_above
        # By memory: of the drafts at each place, how many were right with all before them, lately; of the sequences
        # that were verified, how many had drafts.
        self._rates = np.ones((len(_MEMORY), most))
        self._shares = np.ones(len(_MEMORY))
        self._seconds: dict[tuple[int, int], float] = {}
        self._passed = self._verified = 0

    def off(self, sequences: int) -> bool:
        """Whether a step of so many verifies nothing, whatever drafts there are."""
        return self._off_above is not None and sequences > self._off_above

    def best(self, sequences: int, lengths: Sequence[int], share: float | None = None) -> int:
        """How many tokens of each sequence the next step should compute: one of the lengths, ascending and above 1, or
        1. That is what has given the most tokens for its time. What does not pay is tried now and then, since texts
        change, and so are steps without drafts where those pay, since what they gain is measured by them. share: of the
        sequences that have drafts, None where only the device knows: as many as lately."""
        if not lengths or self.off(sequences):
            return 1
        shares = self._shares if share is None else np.full(len(_MEMORY), share)
        gains = [1 + float((shares * self._rates[:, : q - 1].sum(axis=1)).max()) for q in lengths]
        speeds = [gain / self._cost(q, sequences) for q, gain in zip(lengths, gains, strict=True)]
        fastest = int(np.argmax(speeds))
        if speeds[fastest] > 1:
            self._verified = (self._verified + 1) % _PLAIN
            about = sequences.bit_length()
            unknown = (lengths[fastest], about) in self._seconds and (1, about) not in self._seconds
            return 1 if unknown or self._verified == 0 else lengths[fastest]
        self._passed = (self._passed + 1) % _PROBE
        return lengths[fastest] if self._passed == 0 else 1

    def _cost(self, query_len: int, sequences: int) -> float:
        """Of a step that verifies, in plain steps: as measured, or as usual."""
        about = sequences.bit_length()
        plain, verified = self._seconds.get((1, about)), self._seconds.get((query_len, about))
        if plain and verified:
            return verified / plain
        each, more = _PRIOR
        return 1 + (query_len - 1) * (each + more * sequences)

    def timed(self, query_len: int, sequences: int, seconds: float) -> None:
        """A step took so long in which all sequences computed so many tokens."""
        key = query_len, sequences.bit_length()
        mean = self._seconds.setdefault(key, seconds)
        share = _FALL if seconds < mean else _RISE
        self._seconds[key] = mean + share * (min(seconds, 2 * mean) - mean)

    def learn(self, kept: np.ndarray, drafted: np.ndarray) -> None:
        """A step's result: how many tokens were kept of each sequence, one at least, and how many drafts each had."""
        if len(drafted):
            self._shares += _MEMORY * (float((drafted > 0).mean()) - self._shares)
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
