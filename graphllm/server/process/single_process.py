"""What requests share (`graphllm.server.service.shared_state`), in the memory of one process."""

from __future__ import annotations

from collections.abc import Sequence

from graphllm.config.server import ServerConfig
from graphllm.server.http.rate_limit import RateLimit, RateLimiter
from graphllm.server.http.room import Room
from graphllm.server.service.adapters import OwnAdapters, ServedAdapter
from graphllm.server.service.generation import Running
from graphllm.server.service.shared_state import Overview, Shared
from graphllm.server.service.stored_responses import OwnResponses, ResponseStore
from graphllm.server.supervision.engine_view import EngineView
from graphllm.server.supervision.metrics import Metrics

_ROOM = 32 << 20  # bytes of large bodies that are read and not tokenized yet; one of the largest always has room
_VALUES = 128 << 20  # bytes of what they become


def in_memory(
    overview: Overview,
    config: ServerConfig,
    store: ResponseStore,
    adapters: Sequence[ServedAdapter] = (),
) -> Shared:
    """config: has the largest body and the rate of each caller. adapters: served from the start."""
    tokens, seconds = config.access.rate_limit_token, config.access.rate_limit_interval
    limiter = None if tokens is None else RateLimiter(RateLimit(tokens, seconds))
    rooms = Room(max(_ROOM, config.serving.max_body_size)), Room(_VALUES)
    return Shared(*rooms, limiter, OwnResponses(store), overview, OwnAdapters(adapters))


class OwnOverview:
    """Of a server with all its requests in this process."""

    def __init__(self, supervisor: EngineView, metrics: Metrics, running: Running) -> None:
        self._supervisor, self._metrics, self._running = supervisor, metrics, running

    async def metrics(self, openmetrics: bool) -> tuple[bytes, str]:
        return self._metrics.render(await self._supervisor.stats(), openmetrics)

    async def in_flight(self) -> int:
        return self._metrics.in_flight

    async def abort(self, names: Sequence[str]) -> int:
        ids = self._running.of(names)
        await self._supervisor.engine.abort(ids)
        return len(ids)
