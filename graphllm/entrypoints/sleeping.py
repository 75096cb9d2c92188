"""Sleeping of an engine that a script drives step by step: its core in this process, or several in theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from graphllm.config import ConfigError
from graphllm.engine.core import EngineCore
from graphllm.engine.process.sleep_orders import (
    PAUSE,
    SCHEDULING,
    SleepError,
    SleepOrder,
    SleepState,
    begin,
    check_level,
    check_mode,
    check_tags,
    obey,
)
from graphllm.engine.requests.request import Core
from graphllm.runtime.sleeping.rank_sleep import CACHE, TAGS


class Sleeper(Protocol):
    """Can sleep; `graphllm.engine.process.sleep_orders` has the words."""

    def sleep(self, level: object = 1, mode: object = "abort") -> None: ...
    def wake_up(self, tags: Sequence[str] | None = None) -> bool: ...
    def is_sleeping(self) -> bool: ...
    def release_kv_cache_memory(self) -> None: ...


def sleeper(core: Core, step: Callable[[], object]) -> Sleeper:
    """What has a core sleep. step: makes one step of it, for requests that finish before."""
    return OwnCore(core, step) if isinstance(core, EngineCore) else cast("Sleeper", core)


class OwnCore:
    """The only core of an engine, in this process."""

    def __init__(self, core: EngineCore, step: Callable[[], object]) -> None:
        self._core, self._step = core, step

    def sleep(self, level: object = 1, mode: object = "abort") -> None:
        """Raises ConfigError, SleepError; it is awake as before then."""
        found, how = check_level(level), check_mode(mode)
        try:
            self._move(SleepOrder(0, "pause", mode=how))
            self._move(SleepOrder(0, "sleep", level=found, tags=list(TAGS if found else ())))
        except (ConfigError, SleepError):
            obey(self._core, SleepOrder(0, "resume"))
            raise

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Whether all of it is awake now. Raises ConfigError, SleepError; it is asleep as before then."""
        wanted = check_tags(tags)
        self._move(SleepOrder(0, "wake", tags=[tag for tag in wanted if tag in TAGS]))
        missing = self._move(SleepOrder(0, "resume")).asleep
        if missing and wanted == [SCHEDULING]:
            raise ConfigError(f"tags: the memory of {' and '.join(missing)} is given back; wake it up first")
        return not missing

    def is_sleeping(self) -> bool:
        """Whether it sleeps, or is paused."""
        return self._move(SleepOrder(0, "state")).paused

    def release_kv_cache_memory(self) -> None:
        """Give back the cache's memory alone, at level 0. Raises ConfigError, SleepError."""
        if not self.is_sleeping():
            raise ConfigError("release_kv_cache_memory: the engine is awake; sleep at level 0 first")
        self._move(SleepOrder(0, "sleep", level=PAUSE, tags=[CACHE]))

    def _move(self, order: SleepOrder) -> SleepState:
        begin(self._core, order)
        while (state := obey(self._core, order)) is None:
            self._step()
        if state.error is not None:
            raise ConfigError(state.error) if state.mistake else SleepError(state.error)
        return state
