"""How often drafts were right, and whether verifying more of them pays."""

from __future__ import annotations

import numpy as np

_MEMORY = 0.05  # of the newest step in the running mean
_PAYS = (0.1, 1 / 160)  # tokens won by a sequence in a step, at least: for any step, and more for each sequence
_PROBE = 16  # of steps that would not pay, one verifies


class Acceptance:
    """Of the drafts on the device, which every sequence has, good ones or not.

    drafts, draft_tokens: verified so far; of a sequence in a step, and their tokens. by_position: how many were right
    at each place.
    """

    def __init__(self, most: int) -> None:
        self.drafts = self.draft_tokens = 0
        self.by_position = np.zeros(most, dtype=np.int64)
        self._won = float(most)  # by a sequence in a step, lately
        self._passed = 0

    def pays(self, sequences: int) -> bool:
        """Whether the next step should verify. What a step costs more grows with its sequences; those that do not pay
        are tried now and then, since texts change."""
        least, each = _PAYS
        if self._won >= least + each * sequences:
            return True
        self._passed = (self._passed + 1) % _PROBE
        return self._passed == 0

    def learn(self, kept: np.ndarray, drafted: int) -> None:
        """A step's result: how many tokens were kept of each sequence, one at least, with so many drafts each."""
        if not len(kept):
            return
        self.drafts += len(kept)
        self.draft_tokens += drafted * len(kept)
        right = kept - 1
        self.by_position[:drafted] += (right[:, None] > np.arange(drafted)).sum(axis=0)
        self._won += _MEMORY * (float(right.mean()) - self._won)
