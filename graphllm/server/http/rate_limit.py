"""How many requests each caller may send: a token bucket for each."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

_CALLERS = 1 << 16  # that are remembered; the one that has asked longest ago is forgotten first


class RateLimit(NamedTuple):
    """A number of requests in a number of seconds, all at once or spread."""

    requests: int
    seconds: float


class RateLimiter:
    """A bucket holds ``limit.requests`` tokens and fills within ``limit.seconds``; each request takes one."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when there were

    async def take(self, caller: str) -> float:
        """Take a token of a caller's; 0 if there was one, else the seconds until there will be."""
        most, pace, now = self._limit.requests, self._limit.requests / self._limit.seconds, self._clock()
        tokens, since = self._buckets.pop(caller, (float(most), now))
        tokens = min(most, tokens + (now - since) * pace)
        allowed = tokens >= 1
        self._buckets[caller] = (tokens - allowed, now)
        if len(self._buckets) > _CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / pace
