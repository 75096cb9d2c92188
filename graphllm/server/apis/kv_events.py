"""Where routers find the events of the prefix cache."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from graphllm.server.http.document import errors
from graphllm.server.http.wire import JsonRoute
from graphllm.server.service.service import Service


def kv_event_routes(service: Service) -> APIRouter:
    """The route, for one service."""
    router = APIRouter(route_class=JsonRoute, tags=["Server"], responses=errors(401, 503))

    @router.get("/kv_event_sources")
    async def kv_event_sources() -> dict[str, dict[str, Any]]:
        """The publisher of each engine core, by its rank; empty without --kv-events-config."""
        found = await service.supervisor.engine.get_kv_event_sources()
        return {str(rank): source for rank, source in sorted(found.items())}

    return router
