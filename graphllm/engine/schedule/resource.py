"""Resource: what a request holds in addition to its slot and blocks: an adapter's tables, rows for its items.

The scheduler asks each resource whether a request may join a step. A part offers one as `Part.resource`.
"""

from __future__ import annotations

from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.requests.request_table import RequestState, RequestTable


class Resource:
    """Every method has an empty default. No torch."""

    def check(self, request: EngineRequest) -> None:
        """Raise ConfigError for a request that can never have it."""

    def begin(self) -> None:
        """The scheduler looks at the requests that wait, from the first on."""

    def acquire(self, state: RequestState) -> bool:
        """Take what a waiting request needs. False: it goes on waiting, and later requests may pass."""
        return True

    def hold(self, state: RequestState, num_cached: int) -> bool:
        """Take what depends on how many of its tokens are in the cache. False: it goes on waiting, and so do all later
        requests."""
        return True

    def place(self, state: RequestState, table: RequestTable) -> None:
        """The request has a slot: fill columns of it."""

    def release(self, state: RequestState, joined: bool) -> None:
        """Give back what a request has taken, if it has. joined: False for one that was in no step."""
