"""`StatLogger` gets an engine's figures every ten seconds; `LoggingStatLogger` writes them to the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from graphllm.config import EngineArgs
from graphllm.config.vllm.view import VllmConfig
from graphllm.engine.process.messages import EngineDeadError
from graphllm.engine.requests.request import CoreStats
from graphllm.entrypoints.vllm_config import vllm_config

SECONDS = 10.0
_log = logging.getLogger(__name__)


class StatLogger(Protocol):
    """Gets the figures of one engine."""

    def record(self, scheduler_stats: CoreStats, iteration_stats: None, *, engine_idx: int) -> None:
        """The engine's figures as of now; counters grow from its start. iteration_stats: None, there are none of single
        steps. engine_idx: 0."""

    def log(self) -> None:
        """Time to say something; comes after a `record`."""


StatLoggerFactory = Callable[[VllmConfig, int], StatLogger]  # of an engine's config and its number, which is 0


class LoggingStatLogger:
    """A line at level info: tokens a second since the last one, requests, cache. Nothing while nothing happens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._then = clock, clock()
        self._before = self._now = CoreStats()
        self._idle = True

    def record(self, scheduler_stats: CoreStats, iteration_stats: None = None, *, engine_idx: int = 0) -> None:
        """Keep the figures."""
        self._now = scheduler_stats

    def log(self) -> None:
        """Write the line; the first line after the end of all work still comes."""
        now, before, at = self._now, self._before, self._clock()
        seconds, self._then, self._before = max(at - self._then, 1e-9), at, now
        new = now.started != before.started  # another core, with counters from 0
        prompt = now.prompt_tokens - (0 if new else before.prompt_tokens)
        made = now.generated_tokens - (0 if new else before.generated_tokens)
        idle = not (prompt or made or now.running or now.waiting)
        if not (idle and self._idle):
            hits = 100 * now.prefix_hits / max(now.prefix_queries, 1)
            _log.info(
                "prompts %.1f tokens/s, output %.1f tokens/s, running %d, waiting %d, KV cache %.1f %%, "
                "prefix cache hits %.1f %%",
                prompt / seconds, made / seconds, now.running, now.waiting, 100 * now.kv_usage, hits,
            )  # fmt: skip
        self._idle = idle


def stat_loggers(args: EngineArgs, factories: Sequence[StatLoggerFactory] | None) -> list[StatLogger]:
    """The user's, else the line in the log; none where that is disabled. Raises ConfigError for a model that is not
    there."""
    if args.disable_log_stats:
        return []
    if factories is None:
        return [LoggingStatLogger()]
    config = vllm_config(args)
    return [make(config, 0) for make in factories]


def log_all(loggers: Iterable[StatLogger], stats: CoreStats) -> None:
    """Have every logger write the figures."""
    for logger in loggers:
        logger.record(stats, None, engine_idx=0)
        logger.log()


async def log_regularly(log: Callable[[], Awaitable[None]], gone: Callable[[], bool]) -> None:
    """Call ``log`` every ten seconds until the engine is gone for good. gone: whether a dead one is."""
    while True:
        await asyncio.sleep(SECONDS)
        try:
            await log()
        except EngineDeadError:
            if gone():
                return
