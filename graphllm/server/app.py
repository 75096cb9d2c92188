"""The HTTP application: which routes there are, what answers their errors, what every request passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.routing import Match

from graphllm import __version__
from graphllm.server.anthropic_routes import anthropic_routes
from graphllm.server.document import METRICS, errors
from graphllm.server.errors import KNOWN, describe, error_response
from graphllm.server.guard import Guard
from graphllm.server.openai_routes import openai_routes
from graphllm.server.pages import chat_page
from graphllm.server.protocol import HealthStatus
from graphllm.server.response_models import Load, Version
from graphllm.server.responses_routes import responses_routes
from graphllm.server.service import Service
from graphllm.server.wire import App, GoneError, json_response, record_of


@dataclass(frozen=True)
class Access:
    """Who may ask. keys: any of them; none: everybody. origins: of pages on other hosts that may, for CORS."""

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()


def create_app(service: Service, access: Access = Access()) -> App:
    """The ASGI application of one service."""
    app = FastAPIOffline(  # /docs with its scripts from here: a server may have no way to the Internet
        title="graphllm",
        version=__version__,
        description="OpenAI's and Anthropic's APIs, served by graphllm.",
        redoc_url=None,
    )
    for routes in (openai_routes, responses_routes, anthropic_routes):
        app.include_router(routes(service))
    guard = Guard(app, access.keys, service.limits.body, service.metrics)
    _add_probes(app, service, guard)
    _add_errors(app)
    if not access.origins:
        return guard
    headers = ["x-request-id", "retry-after"]
    return CORSMiddleware(guard, access.origins, allow_methods=["*"], allow_headers=["*"], expose_headers=headers)


def _add_probes(app: FastAPI, service: Service, guard: Guard) -> None:
    host, metrics = service.host, service.metrics

    def health(good: bool) -> Response:
        body = HealthStatus(status=host.status, cause=host.cause)
        response = json_response(body.model_dump(exclude_none=True), 200 if good else 503)
        response.headers["cache-control"] = "no-store"
        return response

    probe: dict[str, Any] = {
        "tags": ["Health"],
        "responses": {200: {"model": HealthStatus}, 503: {"model": HealthStatus}},
    }

    @app.get("/health/startup", **probe)
    async def startup() -> Response:
        """200 once the engine has been ready."""
        return health(host.was_ready.is_set())

    @app.get("/health/live", **probe)
    async def live() -> Response:
        """503 when only a new process can help."""
        host.look()
        return health(host.live)

    @app.get("/health/ready", **probe)
    @app.get("/health", **probe)
    @app.get("/ping", **probe)
    async def ready() -> Response:
        """200 while the engine makes progress, or could."""
        return health(host.ready)

    @app.get("/version", tags=["Server"], responses=errors(401))
    async def version() -> Version:
        """Of graphllm."""
        return Version(version=__version__)

    @app.get("/load", tags=["Server"], responses=errors(401))
    async def load() -> Load:
        """Requests that are being answered, this one not counted."""
        return Load(server_load=guard.in_flight - 1)

    @app.get("/metrics", tags=["Server"], response_class=Response, responses=METRICS | errors(401))
    async def prometheus(request: Request) -> Response:
        """For Prometheus."""
        wants_open = "application/openmetrics-text" in request.headers.get("accept", "")
        text, kind = metrics.render(await host.stats(), wants_open)
        return Response(text, headers={"content-type": kind})

    page = chat_page()

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return page


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(request.scope, 400, _told(error, record_of(request.scope).body))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path, headers = request.scope["path"], error.headers
        if error.status_code == 404:
            message = f"path: nothing is at {path!r:.80}; see /docs"
        elif error.status_code == 405:
            message = f"method is {request.method!r:.20}: {path!r:.80} does not take it; see /docs"
            headers = {"Allow": ", ".join(_methods(request))}
        else:
            message = str(error.detail)
        return error_response(request.scope, error.status_code, message, headers)

    async def known(request: Request, error: Exception) -> Response:
        status, message, headers, code = describe(error)
        return error_response(request.scope, status, message, headers, code)

    app.add_exception_handler(GoneError, _gone)
    for kind in (*KNOWN, Exception):  # what is not known goes on to the log of uvicorn
        app.add_exception_handler(kind, known)


def _methods(request: Request) -> list[str]:
    """What the path of a request takes; several routes may have it, each for one method."""
    scopes = [{**request.scope, "method": method} for method in ("GET", "HEAD", "POST", "DELETE")]
    return [s["method"] for s in scopes if any(route.matches(s)[0] is Match.FULL for route in request.app.routes)]


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _told(error: RequestValidationError, body: Any) -> str:
    """The first thing that is wrong with a body, in the form of all our messages."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"body: no JSON that can be read ({first.get('ctx', {}).get('error')})"
    where, *place = first["loc"]
    if where != "body":  # of the address
        return f"{place[0]} is {first['input']!r:.80}: {first['msg']}"
    if not place:
        return "body: give a JSON object, with the header Content-Type: application/json"
    field, value = "", body
    for step in place:
        missing = step == place[-1] and first["type"] == "missing"
        inside = isinstance(value, list) if isinstance(step, int) else isinstance(value, dict) and step in value
        if not (inside or missing):
            break  # the name of one of several types that the value could have had
        field += f"[{step}]" if isinstance(step, int) else f".{step}"
        value = None if missing else value[step]
    field = field.lstrip(".")
    if first["type"] == "missing":
        return f"{field} is missing: give it"
    return f"{field} is {value!r:.80}: {first['msg']}"
