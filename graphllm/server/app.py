"""The HTTP application: which routes there are, what answers their errors, what every request passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.routing import Match

from graphllm.config.server import AccessConfig
from graphllm.config.vllm.unserved import UNSERVED
from graphllm.server.apis.admin import admin_routes
from graphllm.server.apis.anthropic.routes import anthropic_routes
from graphllm.server.apis.kv_events import kv_event_routes
from graphllm.server.apis.openai.adapters import adapter_routes
from graphllm.server.apis.openai.models import model_routes
from graphllm.server.apis.openai.routes import openai_routes
from graphllm.server.apis.page import page_routes
from graphllm.server.apis.pooling.routes import pooling_routes
from graphllm.server.apis.probes import probe_routes
from graphllm.server.apis.responses.routes import responses_routes
from graphllm.server.apis.sleeping import sleep_routes
from graphllm.server.http.errors import KNOWN, describe, error_response
from graphllm.server.http.wire import App, GoneError, record_of
from graphllm.server.middleware import Middleware
from graphllm.server.multi_model import ByModel
from graphllm.server.service.service import Service
from graphllm.server.supervision.metrics import Metrics
from graphllm.version import __version__


def create_app(services: Sequence[Service], http: Metrics, access: AccessConfig, lora_dir: str | None = None) -> App:
    """The ASGI application of a server. services: of its models. http: counts what comes. lora_dir: folder of the
    adapters that requests may load, None for none."""
    apps = [_application(service, services, access, lora_dir) for service in services]
    app = apps[0] if len(apps) == 1 else ByModel(services, apps)
    middleware = Middleware(app, access, services[0].limits.body, http, services[0].shared)
    if not access.allowed_origins:
        return middleware
    headers = ["x-request-id", "retry-after", "x-max-tokens-clamped"]
    return CORSMiddleware(
        middleware,
        access.allowed_origins,
        allow_methods=access.allowed_methods,
        allow_headers=access.allowed_headers,
        allow_credentials=access.allow_credentials,
        expose_headers=headers,
    )


def _application(service: Service, services: Sequence[Service], access: AccessConfig, lora_dir: str | None) -> FastAPI:
    """The routes of one service, and those that tell of all."""
    kind = (
        FastAPI if access.disable_fastapi_docs else FastAPIOffline
    )  # with the scripts of /docs: there may be no way to the Internet
    app = kind(
        title="graphllm",
        version=__version__,
        description="OpenAI's and Anthropic's APIs, served by graphllm.",
        redoc_url=None,
        openapi_url=None if access.disable_fastapi_docs else "/openapi.json",
        # For /docs, which then asks for the key and sends it.
        dependencies=[Depends(HTTPBearer(auto_error=False))] if access.api_key else [],
    )
    apis = (openai_routes, responses_routes, anthropic_routes, pooling_routes)
    for routes in (*apis, admin_routes, sleep_routes, kv_event_routes):
        app.include_router(routes(service))
    app.include_router(model_routes(services))
    app.include_router(probe_routes({s.names[0]: s.supervisor for s in services}, service.shared.overview))
    app.include_router(page_routes())
    if lora_dir is not None:
        app.include_router(adapter_routes(service, lora_dir))
    _add_errors(app)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(request.scope, 400, _told(error, record_of(request.scope).body))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path, headers = request.scope["path"], error.headers
        if error.status_code in (404, 405) and path in UNSERVED:
            return error_response(request.scope, 404, f"path: {path} is not served; {UNSERVED[path]}")
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
    for kind in (*KNOWN, Exception):  # what is not known goes on to the middleware, which logs it
        app.add_exception_handler(kind, known)


def _methods(request: Request) -> list[str]:
    """What the path of a request takes; several routes may have it, each for one method."""
    scopes = [{**request.scope, "method": method} for method in ("GET", "POST", "DELETE")]
    found = [s["method"] for s in scopes if any(route.matches(s)[0] is Match.FULL for route in request.app.routes)]
    return ["HEAD", *found] if "GET" in found else found


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
