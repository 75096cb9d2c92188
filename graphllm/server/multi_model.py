"""Several models of one server: each has an engine, a service and routes of its own, and a request goes to the
model that it names, or to the first one that can do what its route asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from graphllm.engine.requests.request import CoreInfo
from graphllm.server.apis.openai.adapters import LOAD, UNLOAD
from graphllm.server.apis.pooling.routes import VECTORS
from graphllm.server.http.errors import UnavailableError
from graphllm.server.http.wire import LONG, App, Message, Receive, Scope, Send
from graphllm.server.service.generation import Running
from graphllm.server.service.service import Service
from graphllm.server.supervision.engine_view import EngineView
from graphllm.server.supervision.joint_metrics import JointMetrics
from graphllm.server.supervision.metrics import Metrics

# What a route wants of a model; all others want one that generates text.
_WANTED: Mapping[str, Callable[[CoreInfo], bool]] = {
    **dict.fromkeys(VECTORS, lambda info: info.task == "pool"),
    **dict.fromkeys((LOAD, UNLOAD), lambda info: bool(info.adapted)),
}


class _Named(msgspec.Struct):
    """What of a body says where it goes."""

    model: Any = None


class ByModel:
    """ASGI: hands each request to the application of its model. A body comes as one message, as `Middleware` reads it;
    requests without one name a model in the query."""

    def __init__(self, services: Sequence[Service], apps: Sequence[App]) -> None:
        self._services, self._apps = services, apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = parse_qs(scope["query_string"].decode("latin-1")).get("model", [None])[0]
        if scope["method"] != "POST":
            await self._apps[await self._choose(name, scope["path"])](scope, receive, send)
            return
        message: Message | None = await receive()
        assert message is not None
        body = message.get("body", b"")
        named = await asyncio.to_thread(_model_of, body) if len(body) > LONG else _model_of(body)
        del body

        async def again() -> Message:
            nonlocal message
            taken, message = message, None  # not kept here for as long as the answer takes
            return await receive() if taken is None else taken

        await self._apps[await self._choose(named or name, scope["path"])](scope, again, send)

    async def _choose(self, name: str | None, path: str) -> int:
        """The number of the model: by its name or the name of one of its adapters; else by the route."""
        numbers = range(len(self._services))
        if name:
            for i in numbers:
                if name in self._services[i].names:
                    return i
            for i in numbers:
                if await self._services[i].shared.adapters.find(name) is not None:
                    return i
        wanted = _WANTED.get(path, lambda info: info.task == "generate")
        return min(numbers, key=lambda i: _rank(self._services[i], wanted))


def _rank(service: Service, wanted: Callable[[CoreInfo], bool]) -> int:
    """0 for a model that does what is wanted, 1 for one that nothing is known of now."""
    try:
        return 0 if wanted(service.info) else 2
    except UnavailableError:
        return 1


def _model_of(body: bytes) -> str | None:
    """The name in a body; None where it has none, and for one that cannot be read, which its route will say."""
    try:
        name = msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return name if isinstance(name, str) else None


class JointOverview:
    """Of several models with all their requests in this process.

    http: counters of all requests.
    models: engine, metrics and running requests of each, by its name.
    """

    def __init__(self, http: Metrics, models: Mapping[str, tuple[EngineView, Metrics, Running]]) -> None:
        self._http, self._models = http, models
        self._metrics = JointMetrics(http, {name: metrics for name, (_, metrics, _) in models.items()})

    async def metrics(self, openmetrics: bool) -> tuple[bytes, str]:
        stats = await asyncio.gather(*(view.stats() for view, _, _ in self._models.values()))
        return self._metrics.render(stats, openmetrics)

    async def in_flight(self) -> int:
        return self._http.in_flight

    async def abort(self, names: Sequence[str]) -> int:
        count = 0
        for view, _, running in self._models.values():
            if ids := running.of(names):
                await view.engine.abort(ids)
                count += len(ids)
        return count
