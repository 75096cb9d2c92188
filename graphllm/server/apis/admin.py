"""Routes for whoever runs a server, with a key of --admin-api-key: what is served, the tokenizer, the prefix cache,
profiles, the requests. They show no paths of this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from graphllm.server.http.bodies import Answer, Items, Object
from graphllm.server.http.document import errors
from graphllm.server.http.wire import JsonRoute
from graphllm.server.service.service import Service
from graphllm.version import __version__

_SECRET = frozenset({"cache_secret", "scheduler_cls"})  # of the scheduler's settings


class ServerInfo(Answer):
    """engine: its sizes. scheduler: its settings."""

    version: str
    models: list[str]
    status: str
    startup_seconds: dict[str, float]
    engine: dict[str, Any]
    scheduler: dict[str, Any]


class TokenizerInfo(Answer):
    tokenizer_class: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    stop_token_ids: list[int]
    chat_template: str


class Reset(Answer):
    """reset: False while requests use some of the cache; nothing is done then."""

    reset: bool


class Started(Answer):
    started: bool


class Traces(Answer):
    """traces: where the server runs, one of each rank; for Perfetto."""

    traces: list[str]


class AbortBody(Object):
    """POST /abort_requests"""

    request_ids: Items[str] = Field(description="As the clients call them: x-request-id, or request_id of a body.")


class Aborted(Answer):
    aborted: int


def admin_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(route_class=JsonRoute, tags=["Admin"], responses=errors(400, 403, 503))

    @router.get("/server_info")
    async def server_info() -> ServerInfo:
        """What is served, and how."""
        supervisor, opened = service.supervisor, service.supervisor.opened
        scheduler = {} if opened is None else dataclasses.asdict(opened.config.scheduler)
        ready = supervisor.engine.ready
        assert ready is not None
        info = {name: getattr(ready.info, name) for name in ready.info.__struct_fields__}
        shown = {name: value for name, value in scheduler.items() if name not in _SECRET}
        return ServerInfo(
            version=__version__,
            models=list(service.names),
            status=supervisor.status,
            startup_seconds={name: round(seconds, 3) for name, seconds in supervisor.phases.items()},
            engine=info,
            scheduler=shown,
        )

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        """The model's tokenizer and chat template."""
        tokenizer = service.tokenizer
        return TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=tokenizer.vocab_size,
            bos_token_id=tokenizer.bos_id,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id,
            stop_token_ids=sorted(tokenizer.stop_ids),
            chat_template=tokenizer.chat_template,
        )

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Reset:
        """Forget the cached beginnings of prompts."""
        return Reset(reset=await service.supervisor.engine.reset_prefix_cache())

    @router.post("/start_profile")
    async def start_profile() -> Started:
        """Have every rank write down its kernels and steps, into the folder profile/ where the server runs."""
        await service.supervisor.engine.start_profile()
        return Started(started=True)

    @router.post("/stop_profile")
    async def stop_profile() -> Traces:
        """End the profile."""
        return Traces(traces=await service.supervisor.engine.stop_profile())

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody, request: Request) -> Aborted:
        """End requests; what they have so far is their answer, with finish_reason abort."""
        return Aborted(aborted=await service.shared.overview.abort(body.request_ids))

    return router
