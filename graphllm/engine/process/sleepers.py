"""Cores that sleep together: every move is given to all of them before the next one, and undone where one cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from graphllm.config import ConfigError
from graphllm.engine.process.sleep_orders import (
    PAUSE,
    SCHEDULING,
    Move,
    SleepError,
    SleepOrder,
    SleepState,
    check_level,
    check_mode,
    check_tags,
)
from graphllm.runtime.sleeping.rank_sleep import CACHE, TAGS

Ask = Callable[[SleepOrder], Awaitable[SleepState]]


class Sleepers:
    """What engine cores in other processes can do together."""

    @property
    def sleepers(self) -> list[Ask]:
        """By which each core is given an order."""
        raise NotImplementedError

    async def sleep(self, level: object = 1, mode: object = "abort") -> None:
        """See `sleep`."""
        await sleep(self.sleepers, level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """See `wake_up`."""
        return await wake_up(self.sleepers, tags)

    async def is_sleeping(self) -> bool:
        """See `is_sleeping`."""
        return await is_sleeping(self.sleepers)

    async def release_kv_cache_memory(self) -> None:
        """See `release_cache`."""
        await release_cache(self.sleepers)


async def sleep(cores: Sequence[Ask], level: object = 1, mode: object = "abort") -> None:
    """Have all cores sleep, or none.

    level: 1 or 2; 0 for a pause that gives no memory back.
    mode: see `Sleep.pause`.

    Raises ConfigError, SleepError.
    """
    found, how = check_level(level), check_mode(mode)
    tags = list(TAGS if found else ())
    try:
        await _all(cores, SleepOrder(0, "pause", mode=how))
        await _all(cores, SleepOrder(0, "sleep", level=found, tags=tags), undo="wake")
    except BaseException:
        await _all(cores, SleepOrder(0, "resume"), quietly=True)
        raise


async def wake_up(cores: Sequence[Ask], tags: Sequence[str] | None = None) -> bool:
    """Have the memory of tags again on all cores, or on none, and let requests run once all memory is there; whether
    they do. Raises ConfigError, SleepError."""
    wanted = check_tags(tags)
    await _all(cores, SleepOrder(0, "wake", tags=[tag for tag in wanted if tag in TAGS]), undo="put_back")
    states = await _all(cores, SleepOrder(0, "resume"))
    missing = sorted({tag for state in states for tag in state.asleep}, key=TAGS.index)
    if missing and wanted == [SCHEDULING]:
        raise ConfigError(f"tags: the memory of {' and '.join(missing)} is given back; wake it up first")
    return not missing


async def is_sleeping(cores: Sequence[Ask]) -> bool:
    """Whether any core sleeps or is paused."""
    return any(state.paused for state in await _all(cores, SleepOrder(0, "state")))


async def release_cache(cores: Sequence[Ask]) -> None:
    """Give back the memory of the cache alone, of cores that sleep at level 0. Raises ConfigError, SleepError."""
    if not all(state.paused for state in await _all(cores, SleepOrder(0, "state"))):
        raise ConfigError("release_kv_cache_memory: the engine is awake; sleep at level 0 first")
    await _all(cores, SleepOrder(0, "sleep", level=PAUSE, tags=[CACHE]), undo="wake")


async def _all(
    cores: Sequence[Ask], order: SleepOrder, undo: Move | None = None, quietly: bool = False
) -> list[SleepState]:
    """Have all cores make a move. undo: of those that have made it, where one has not. quietly: whatever comes of
    it."""
    found = await asyncio.gather(*(ask(order) for ask in cores), return_exceptions=True)
    states = [state for state in found if isinstance(state, SleepState)]
    gone = next((failure for failure in found if isinstance(failure, BaseException)), None)
    failed = next((state for state in states if state.error is not None), None)
    if quietly or (gone is None and failed is None):
        return states
    if undo is not None:
        done = [(ask, state.tags) for ask, state in zip(cores, found, strict=True)
                if isinstance(state, SleepState) and state.error is None and state.tags]  # fmt: skip
        back = (ask(SleepOrder(0, undo, tags=tags)) for ask, tags in done)
        await asyncio.gather(*back, return_exceptions=True)
    if gone is not None:
        raise gone
    assert failed is not None
    error = failed.error or ""
    raise ConfigError(error) if failed.mistake else SleepError(error)
