"""What all processes that answer requests of one server have in common: bounds of memory and rate, stored responses,
the view of whoever runs it.

Where one process answers all of them, these are objects in it (`graphllm.server.process.single_process`); where there
are several, each asks the one that has started them (`graphllm.server.process.fronts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from graphllm.server.service.adapters import Adapters
from graphllm.server.service.stored_responses import Responses


class SharedRoom(Protocol):
    """Memory (`graphllm.server.http.room.Room`)."""

    async def take(self, size: int, held: contextlib.ExitStack) -> None: ...


class SharedRate(Protocol):
    """How often each caller may ask (`graphllm.server.http.rate_limit.RateLimiter`)."""

    async def take(self, caller: str) -> float: ...


class Overview(Protocol):
    """All requests of the server."""

    async def metrics(self, openmetrics: bool) -> tuple[bytes, str]:
        """The text of its metrics, and the content type."""
        ...

    async def in_flight(self) -> int:
        """HTTP requests that are not answered yet."""
        ...

    async def abort(self, names: Sequence[str]) -> int:
        """End requests by the ids that clients gave them; how many."""
        ...


class Shared(NamedTuple):
    """bodies: for large ones, as they come. values: for what they become. rate: None without a limit."""

    bodies: SharedRoom
    values: SharedRoom
    rate: SharedRate | None
    responses: Responses
    overview: Overview
    adapters: Adapters
