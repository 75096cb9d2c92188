"""One call for vectors in the engine: its prompts run side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from fastapi import Request

from graphllm.config import ConfigError
from graphllm.config.errors import ErrorPlace
from graphllm.config.requests.pooling_params import PoolingParams
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.metrics.metric_families import Finished
from graphllm.engine.requests.outputs import RequestMetrics
from graphllm.engine.requests.request import QueueFullError
from graphllm.engine.vectors.pooling import Pair, Pooling
from graphllm.server.http.errors import EngineFailureError
from graphllm.server.http.wire import cancelled, record_of, while_there
from graphllm.server.service.service import Service
from graphllm.server.supervision.metrics import Metrics

MOST = 2048  # prompts of one request, as OpenAI's
_PARAMS = SamplingParams()


class Found(NamedTuple):
    """The vectors of a call's prompts, in their order, and how many tokens they were made of."""

    vectors: list[np.ndarray]
    tokens: int


async def pooling_of(service: Service) -> Pooling:
    """Of the engine that runs now. Raises UnavailableError."""
    return await service.supervisor.engine.pooling()


async def find_vectors(
    service: Service,
    request: Request,
    prompts: Sequence[Any],
    places: Sequence[ErrorPlace],
    params: PoolingParams,
    task: str,
    priority: int = 0,
    cache_salt: str | None = None,
) -> Found:
    """Run a request for each prompt. places: of these in the body. Raises ConfigError for one that cannot run,
    QueueFullError when the first ones have no room, GoneError when the client leaves."""
    record, engine = record_of(request.scope), service.supervisor.engine
    if len(prompts) > MOST:
        raise ConfigError(f"input has {len(prompts)} entries: give at most {MOST}")
    if priority and service.supervisor.opened.config.scheduler.scheduling_policy != "priority":  # type: ignore[union-attr]
        raise ConfigError(f"priority is {priority}: start with --scheduling-policy priority, or leave it out")
    running = asyncio.Semaphore(service.info.max_num_seqs)
    options: dict[str, Any] = {"task": task, "priority": priority, "cache_salt": cache_salt}
    begun = False

    async def one(prompt: Any, place: ErrorPlace) -> tuple[np.ndarray, int, int]:
        nonlocal begun
        async with running:
            while True:
                arrival = time.monotonic()
                try:
                    asked, found, output = await engine.vector(prompt, params, **options)
                except ConfigError as mistake:
                    raise place.prompt_error(mistake) from None
                except QueueFullError:
                    if not begun:
                        raise
                    await asyncio.sleep(1)  # what the others of this call have done is not thrown away
                    continue
                begun = True
                count = len(asked.request.prompt)
                _count(service.metrics, arrival, output.scheduled, count, output.cached)
                return found, count, output.cached

    try:
        found = await while_there(request, _together(list(map(one, prompts, places))))
    except QueueFullError as full:
        service.metrics.rejected("max_num_queued_reqs")
        full.retry_after = service.metrics.seconds_for(engine.unfinished)
        raise
    except RuntimeError as broken:
        if type(broken) is RuntimeError:
            raise EngineFailureError(str(broken)) from broken
        raise
    finally:
        record.held.close()
    tokens = sum(count for _, count, _ in found)
    record.notes |= {"prompt": tokens, "cached": sum(cached for *_, cached in found), "vectors": len(found)}
    return Found([vector for vector, *_ in found], tokens)


async def _together(works: Sequence[Any]) -> list[Any]:
    """What all return; the first exception ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
    finally:
        await cancelled(*tasks)


def _count(metrics: Metrics, arrival: float, scheduled: float, prompt: int, cached: int) -> None:
    """Count a request that has its vector; it has no tokens, so what is measured of these stays as it was."""
    now = time.monotonic()
    times = RequestMetrics(arrival, scheduled, finished_time=now)
    metrics.finished(Finished(times, _PARAMS, prompt, cached, [0]))
    metrics.completed("stop")
    metrics.ended()


def instructed(pooling: Pooling, prompts: Sequence[Any], params: PoolingParams) -> list[Any]:
    """Prompts of scores as the core is to see them; pairs stay as they are."""
    return [p if isinstance(p, Pair) else pooling.instructed(p, None, params) for p in prompts]
