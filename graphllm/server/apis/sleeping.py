"""Routes by which whoever runs a server has its engine sleep, with a key of --admin-api-key: vLLM's paths."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from graphllm.engine.process.sleep_orders import check_level, check_mode, check_tags
from graphllm.server.http.bodies import Answer
from graphllm.server.http.document import errors
from graphllm.server.http.wire import JsonRoute
from graphllm.server.service.service import Service


class Slept(Answer):
    """level: of the sleep."""

    status: Literal["sleeping"]
    level: int


class Woken(Answer):
    """status: sleeping while some memory is given back; no request runs then. tags_woken: as they were asked for."""

    status: Literal["awake", "sleeping"]
    tags_woken: list[str] | None


class Released(Answer):
    status: Literal["kv_cache_released"]


class IsSleeping(Answer):
    is_sleeping: bool


Level = Annotated[
    str,
    Query(description="1 keeps the weights on the host, 2 drops them, 0 only stops requests and gives nothing back."),
]
Mode = Annotated[
    str,
    Query(
        description="What becomes of running requests. abort: they end; wait: they finish first; keep: they go on "
        "after waking up."
    ),
]
Tags = Annotated[list[str] | None, Query(description="weights, kv_cache, scheduling; all where none is given.")]


def sleep_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(route_class=JsonRoute, tags=["Admin"], responses=errors(400, 403, 503))

    @router.post("/sleep")
    async def sleep(level: Level = "1", mode: Mode = "abort") -> Slept:
        """Give back the memory of weights and cache; --enable-sleep-mode allows it."""
        wanted = check_level(level)
        how = check_mode(mode)
        await service.supervisor.engine.sleep(wanted, how)
        return Slept(status="sleeping", level=wanted)

    @router.post("/wake_up")
    async def wake_up(tags: Tags = None) -> Woken:
        """Have memory again; requests run once all of it is there."""
        check_tags(tags)
        awake = await service.supervisor.engine.wake_up(tags)
        return Woken(status="awake" if awake else "sleeping", tags_woken=tags)

    @router.get("/is_sleeping")
    async def is_sleeping() -> IsSleeping:
        """Whether the engine sleeps."""
        return IsSleeping(is_sleeping=await service.supervisor.engine.is_sleeping())

    @router.post("/release_kv_cache_memory")
    async def release_kv_cache_memory() -> Released:
        """Give back the cache's memory alone, of an engine that sleeps at level 0."""
        await service.supervisor.engine.release_kv_cache_memory()
        return Released(status="kv_cache_released")

    return router
