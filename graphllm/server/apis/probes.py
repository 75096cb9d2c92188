"""Routes of those who run a server: is it up, how busy, which version, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from graphllm.server.http.bodies import Answer
from graphllm.server.http.document import METRICS, errors
from graphllm.server.http.errors import without_folders
from graphllm.server.http.wire import json_response
from graphllm.server.service.shared_state import Overview
from graphllm.server.supervision.engine_view import CoreStatus, EngineView
from graphllm.version import __version__


class HealthStatus(BaseModel):
    """status: starting, ready, degraded, unresponsive, stuck, dead, restarting, draining. cause: why it is not ready.
    engines: of each core, where there are several."""

    status: str
    cause: str | None = None
    engines: list[HealthStatus] | None = None


class Version(Answer):
    version: str


class ServerLoad(Answer):
    server_load: int


def probe_routes(engines: Mapping[str, EngineView], overview: Overview) -> APIRouter:
    """The routes, for one server. engines: by the names of their models. A server is as well as the worst of them."""
    router = APIRouter()

    def health(good: Callable[[EngineView], bool]) -> Response:
        bad = [name for name, engine in engines.items() if not good(engine)]
        name = (bad or list(engines))[0]
        begin = f"{name}: " if len(engines) > 1 else ""

        def status_of(one: EngineView | CoreStatus) -> HealthStatus:
            return HealthStatus(status=one.status, cause=one.cause and without_folders(begin + one.cause))

        body = status_of(engines[name])
        body.engines = [status_of(core) for core in engines[name].cores] or None
        response = json_response(body.model_dump(exclude_none=True), 503 if bad else 200)
        response.headers["cache-control"] = "no-store"
        return response

    probe: dict[str, Any] = {
        "tags": ["Health"],
        "responses": {200: {"model": HealthStatus}, 503: {"model": HealthStatus}},
    }

    @router.get("/health/startup", **probe)
    async def startup() -> Response:
        """200 once the engine has been ready."""
        return health(lambda engine: engine.was_ready.is_set())

    @router.get("/health/live", **probe)
    async def live() -> Response:
        """503 when only a new process can help."""
        for engine in engines.values():
            engine.look()
        return health(lambda engine: engine.live)

    @router.get("/health/ready", **probe)
    @router.get("/ready", **probe)
    @router.get("/health", **probe)
    @router.get("/ping", **probe)
    @router.post("/ping", **probe)
    async def ready() -> Response:
        """200 while the engine makes progress, or could."""
        return health(lambda engine: engine.ready)

    @router.get("/version", tags=["Server"], responses=errors(401))
    async def version() -> Version:
        """Of graphllm."""
        return Version(version=__version__)

    @router.get("/load", tags=["Server"], responses=errors(401))
    async def load() -> ServerLoad:
        """Requests that are being answered, this one not counted."""
        return ServerLoad(server_load=await overview.in_flight() - 1)

    @router.get("/metrics", tags=["Server"], response_class=Response, responses=METRICS | errors(401))
    async def prometheus(request: Request) -> Response:
        """For Prometheus."""
        wants_open = "application/openmetrics-text" in request.headers.get("accept", "")
        text, kind = await overview.metrics(wants_open)
        return Response(text, headers={"content-type": kind})

    return router
