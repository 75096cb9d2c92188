"""Naps: how long a core sleeps between two looks at copies, where it has nothing else to do."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST, _LONGEST = 0.001, 0.05  # seconds
_SHARE = 0.05  # of the time that was waited already


class Naps:
    """The longer nothing comes, the longer they are: a disk that hangs costs no processor.

    clock: seconds.
    sleep: for so many of them.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._since: float | None = None

    def nap(self) -> None:
        """Nothing has come yet."""
        now = self._clock()
        if self._since is None:
            self._since = now
        self._sleep(min(_LONGEST, max(_SHORTEST, _SHARE * (now - self._since))))

    def end(self) -> None:
        """Something has come, or there is something else to do."""
        self._since = None
