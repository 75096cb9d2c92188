"""Cores that sleep together make each move together; where one cannot, none has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.engine.process import sleepers
from graphllm.engine.process.messages import DeathCause, EngineDeadError
from graphllm.engine.process.sleep_orders import OFF, Orders, SleepError, SleepOrder, SleepState
from graphllm.runtime.sleeping.rank_sleep import TAGS


class Core:
    """A core's side of the orders: what is asleep, and whether requests are held back.

    failing: the move that it cannot make. seconds: that a pause takes. log: what all cores were told, in order.
    """

    def __init__(self, log: list[tuple[int, str]], number: int) -> None:
        self._log, self._number = log, number
        self.asleep: list[str] = []
        self.paused, self.failing, self.dead, self.pauses = False, "", False, 0

    async def ask(self, order: SleepOrder) -> SleepState:
        self._log.append((self._number, order.move))
        if self.dead:
            raise EngineDeadError(DeathCause(kind="exit", message="gone"))
        await asyncio.sleep(0)
        if order.move == self.failing:
            return SleepState([], self.asleep, self.paused, f"{order.move}: not here")
        tags: list[str] = []
        match order.move:
            case "pause":
                self.paused = True
                for _ in range(self.pauses):
                    await asyncio.sleep(0)
            case "sleep" | "put_back":
                assert self.paused
                tags = [tag for tag in order.tags if tag not in self.asleep]
                self.asleep = [tag for tag in TAGS if tag in {*self.asleep, *tags}]
            case "wake":
                tags = [tag for tag in order.tags if tag in self.asleep]
                self.asleep = [tag for tag in self.asleep if tag not in tags]
            case "resume":
                self.paused = self.paused and bool(self.asleep)
        return SleepState(tags, list(self.asleep), self.paused)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def cores(count: int = 3) -> tuple[list[Core], list[Any], list[tuple[int, str]]]:
    log: list[tuple[int, str]] = []
    found = [Core(log, number) for number in range(count)]
    return found, [core.ask for core in found], log


@in_a_loop
async def test_moves_are_made_together() -> None:
    found, asks, log = cores()
    found[1].pauses = 20
    await sleepers.sleep(asks, 1)
    assert [move for _, move in log] == ["pause"] * 3 + ["sleep"] * 3
    assert [core.asleep for core in found] == [["weights", "kv_cache"]] * 3
    assert await sleepers.is_sleeping(asks)
    log.clear()
    assert not await sleepers.wake_up(asks, ["weights"])
    assert all(core.paused for core in found)
    assert await sleepers.wake_up(asks)
    assert [move for _, move in log] == (["wake"] * 3 + ["resume"] * 3) * 2
    assert not await sleepers.is_sleeping(asks)


@in_a_loop
async def test_one_cannot_wake_up() -> None:
    """The others are asleep again, and it is as before when it can."""
    found, asks, log = cores()
    await sleepers.sleep(asks, 2)
    await sleepers.wake_up(asks, ["kv_cache"])
    found[2].failing = "wake"
    log.clear()
    with pytest.raises(SleepError, match="wake: not here"):
        await sleepers.wake_up(asks)
    assert [core.asleep for core in found] == [["weights"]] * 3  # not the cache, which was awake before
    assert "resume" not in [move for _, move in log]
    assert all(core.paused for core in found)
    found[2].failing = ""
    assert await sleepers.wake_up(asks)
    assert not any(core.paused for core in found)


@in_a_loop
async def test_one_cannot_fall_asleep() -> None:
    found, asks, _ = cores()
    found[0].failing = "sleep"
    with pytest.raises(SleepError, match="sleep: not here"):
        await sleepers.sleep(asks, 1)
    assert not any(core.asleep or core.paused for core in found)


@in_a_loop
async def test_one_is_gone() -> None:
    found, asks, _ = cores()
    found[1].dead = True
    with pytest.raises(EngineDeadError):
        await sleepers.sleep(asks, 1)
    assert not any(core.asleep or core.paused for core in (found[0], found[2]))
    found[1].dead = False
    await sleepers.sleep(asks, 1)
    found[1].dead = True
    with pytest.raises(EngineDeadError):
        await sleepers.wake_up(asks)
    assert [core.asleep for core in (found[0], found[2])] == [["weights", "kv_cache"]] * 2


@in_a_loop
async def test_mistakes_reach_no_core() -> None:
    _, asks, log = cores()
    for wrong in ({"level": 3}, {"level": None}, {"mode": "later"}):
        with pytest.raises(ConfigError):
            await sleepers.sleep(asks, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        await sleepers.wake_up(asks, ["all"])
    assert log == []


class _Part:
    """A part of the core that is quiet once it was asked so often."""

    name, asleep = "sleep", ()

    def __init__(self, until_quiet: int) -> None:
        self._left, self.paused, self.modes = until_quiet, False, list[str]()

    def pause(self, mode: str) -> None:
        self.paused = True
        self.modes.append(mode)

    def is_quiet(self) -> bool:
        self._left -= 1
        return self.paused and self._left < 0

    def resume(self) -> bool:
        self.paused = False
        return True


def test_a_pause_is_answered_when_it_is_over() -> None:
    class Stub:
        parts = (_Part(2),)

    told: list[tuple[bytes, str, str | None]] = []
    orders = Orders(Stub(), lambda front, order, state: told.append((front, order.move, state.error)))
    orders.take(b"a", SleepOrder(0, "pause", mode="wait"))
    assert (told, orders.open, orders.paused) == ([], True, True)
    orders.look()
    assert told == []
    orders.look()
    assert told == [(b"a", "pause", None)]
    assert (orders.open, orders.paused, Stub.parts[0].modes) == (False, True, ["wait"])


def test_a_pause_that_is_called_off() -> None:
    """By another front, while the first one waits for the requests that run."""

    class Stub:
        parts = (_Part(100),)

    told: list[tuple[bytes, str, str | None]] = []
    orders = Orders(Stub(), lambda front, order, state: told.append((front, order.move, state.error)))
    orders.take(b"a", SleepOrder(0, "pause", mode="wait"))
    orders.take(b"b", SleepOrder(0, "resume"))
    orders.look()
    assert told == [
        (b"b", "resume", None),
        (b"a", "pause", "sleep: the engine was woken up before it had fallen asleep"),
    ]
    assert not orders.paused


def test_a_core_that_cannot_sleep() -> None:
    class Stub:
        parts = ()

    told: list[SleepState] = []
    orders = Orders(Stub(), lambda front, order, state: told.append(state))
    for move in ("pause", "sleep", "wake", "resume", "state"):
        orders.take(b"a", SleepOrder(0, move))  # type: ignore[arg-type]
    assert [(state.error, state.mistake) for state in told] == [(OFF, True)] * 4 + [(None, False)]
    assert not orders.paused
