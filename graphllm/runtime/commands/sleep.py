"""The commands by which every rank gives memory back and takes it again (`graphllm.runtime.sleeping.rank_sleep`)."""

from __future__ import annotations

from collections.abc import Callable

from graphllm.config import ConfigError
from graphllm.runtime.commands.command import Answered, Command, Device, Query
from graphllm.runtime.sleeping.rank_sleep import DROPPED, KEY, RankSleep


class FallAsleep(Query):
    """Give back the memory of tags; the answer has the tags that were awake. level: 1 keeps weights on the host."""

    level: int
    tags: list[str]

    def check(self, device: Device) -> None:
        reason = _of(device).fixed
        if self.level == DROPPED and reason:
            raise ConfigError(f"level is 2: {reason}; use level 1")

    def run(self, device: Device) -> Answered:
        return _answer(device, lambda rank: rank.sleep(self.level, self.tags))


class Awake(Query):
    """Have the memory of tags again; the answer has the tags that were asleep."""

    tags: list[str]

    def run(self, device: Device) -> Answered:
        return _answer(device, lambda rank: rank.wake(self.tags))


class PutBack(Query):
    """Give back what `Awake` has just taken, because another rank or core could not."""

    tags: list[str]

    def run(self, device: Device) -> Answered:
        return _answer(device, lambda rank: rank.put_back(self.tags))


class NeverSleep(Command):
    """Forget what was kept for sleeping: the engine ends."""

    def run(self, device: Device) -> None:
        device.worker.kept.pop(KEY, None)


def _of(device: Device) -> RankSleep:
    found = device.worker.kept.get(KEY)
    if not isinstance(found, RankSleep):
        raise ConfigError("this rank was loaded without enable_sleep_mode")
    return found


def _answer(device: Device, work: Callable[[RankSleep], list[str] | None]) -> Answered:
    """What it gives, once nothing runs; a failure is in the answer."""
    device.synchronize()
    try:
        return Answered(work(_of(device)))
    except Exception as failure:
        return Answered(
            error=str(failure) if isinstance(failure, ConfigError) else f"{type(failure).__name__}: {failure}"
        )
