"""Seconds of repeated calls."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS, _LEAST_RUNS, _MOST_SECONDS = 0.1, 5, 2.0


def times_of(call: Callable[[], object]) -> list[float]:
    """Seconds of calls in turn, but for the first; fewer of those that take long."""
    call()
    taken: list[float] = []
    while sum(taken) < (_SECONDS if len(taken) >= _LEAST_RUNS else _MOST_SECONDS):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return taken
