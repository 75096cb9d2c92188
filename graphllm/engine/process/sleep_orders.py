"""Orders to sleep and to wake up: their words, and how a core obeys them between its steps. The part of the core that
acts is `graphllm.engine.parts.sleep`; `sleepers.py` gives orders to several cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, cast, get_args

import msgspec

from graphllm.config import ConfigError
from graphllm.runtime.sleeping.rank_sleep import TAGS

NAME = "sleep"  # of the part
PauseMode = Literal["abort", "wait", "keep"]
MODES: tuple[str, ...] = get_args(PauseMode)
PAUSE, SCHEDULING = 0, "scheduling"  # the level and the tag that touch no memory
LEVELS = (PAUSE, 1, 2)
OFF = "enable_sleep_mode is off: start the engine with it"
WOKEN = "sleep: the engine was woken up before it had fallen asleep"
Move = Literal["pause", "sleep", "wake", "put_back", "resume", "state"]


class SleepError(RuntimeError):
    """The engine could not fall asleep, and is awake; or it could not wake up, and is asleep."""


class SleepOrder(msgspec.Struct, tag=True):
    """A move of one core; see `Sleep`.

    level, tags: of memory.
    mode: of a pause.
    """

    call: int
    move: Move
    level: int = 1
    mode: str = "abort"
    tags: list[str] = []


class SleepState(msgspec.Struct):
    """What a core has done.

    tags: of the memory that has changed hands.
    asleep: tags of memory that is given back now.
    paused: requests are held back.
    error: why the move could not be made; mistake: because of what was asked.
    """

    tags: list[str] = []
    asleep: list[str] = []
    paused: bool = False
    error: str | None = None
    mistake: bool = False


class SleepPart(Protocol):
    """`graphllm.engine.parts.sleep.Sleep`."""

    asleep: tuple[str, ...]

    @property
    def paused(self) -> bool: ...
    def pause(self, mode: str) -> None: ...
    def is_quiet(self) -> bool: ...
    def sleep(self, level: int, tags: Sequence[str], forget: Callable[[], bool]) -> list[str] | None: ...
    def wake(self, tags: Sequence[str]) -> list[str]: ...
    def put_back(self, tags: Sequence[str]) -> None: ...
    def resume(self) -> bool: ...


def sleep_part(core: Any) -> SleepPart | None:
    """Of an engine core; None where it cannot sleep."""
    parts: Iterable[Any] = getattr(core, "parts", ())
    return next((part for part in parts if part.name == NAME), None)


def obey(core: Any, order: SleepOrder) -> SleepState | None:
    """Make a move, or see whether a pause has come to its end. None: not yet, the core must step on. A failure is in
    the answer."""
    part = sleep_part(core)
    if part is None:
        return SleepState() if order.move == "state" else SleepState(error=OFF, mistake=True)
    tags: list[str] | None = []
    try:
        match order.move:
            case "pause":
                if not part.paused:
                    raise ConfigError(WOKEN)
                tags = [] if part.is_quiet() else None
            case "sleep":
                ready = part.is_quiet() or not part.paused
                tags = part.sleep(order.level, order.tags, lambda: _forget(core, order.level)) if ready else None
            case "wake":
                tags = part.wake(order.tags)
            case "put_back":
                part.put_back(order.tags)
            case "resume":
                part.resume()
    except (ConfigError, SleepError) as failure:
        return SleepState([], list(part.asleep), part.paused, str(failure), isinstance(failure, ConfigError))
    return None if tags is None else SleepState(tags, list(part.asleep), part.paused)


def _forget(core: Any, level: int) -> bool:
    """Empty what lies on the device; False while something holds blocks of it. At level 2, after which the weights may
    be others, also what this process keeps elsewhere. What outlives the process stays."""
    for part in core.parts if level < 2 else ():
        part.leave()
    done: bool = core.scheduler.cache.reset()
    for part in core.parts if done else ():
        part.reset("process" if level > 1 else "device")
    return done


def begin(core: Any, order: SleepOrder) -> None:
    """What an order begins with; `obey` says what comes of it. Its mode was checked."""
    if order.move == "pause" and (part := sleep_part(core)) is not None:
        part.pause(order.mode)


class Orders:
    """The orders that one core has been given, and not answered.

    answer: takes the front's name, the order, and what has come of it.

    open: whether there are any.
    paused: requests are held back.
    """

    def __init__(self, core: Any, answer: Callable[[bytes, SleepOrder, SleepState], object]) -> None:
        self._core, self._answer = core, answer
        self._open: list[tuple[bytes, SleepOrder]] = []
        self.paused = False

    @property
    def open(self) -> bool:
        return bool(self._open)

    def take(self, front: bytes, order: SleepOrder) -> None:
        """Obey an order, now or later."""
        begin(self._core, order)
        self._open.append((front, order))
        self.look()

    def look(self) -> None:
        """Answer what can be answered by now."""
        given, self._open = self._open, []
        for front, order in given:
            state = obey(self._core, order)
            if state is None:
                self.paused = True
                self._open.append((front, order))
            else:
                self.paused = state.paused
                self._answer(front, order, state)


def check_level(level: object) -> int:
    """A level of sleep, as text or a number. Raises ConfigError."""
    found = int(level) if isinstance(level, str) and level.isdecimal() else level
    if isinstance(found, bool) or found not in LEVELS:
        raise ConfigError(
            f"level is {level!r}: use 1, which keeps the weights on the host, 2, which drops them, or 0, which gives "
            "no memory back"
        )
    assert isinstance(found, int)
    return found


def check_mode(mode: object) -> PauseMode:
    """Raises ConfigError."""
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}: use one of {', '.join(MODES)}")
    return cast("PauseMode", mode)


def check_tags(tags: Sequence[str] | None) -> list[str]:
    """What is to wake up; None and nothing stand for all. Raises ConfigError."""
    known = (*TAGS, SCHEDULING)
    for tag in [tags] if isinstance(tags, str) else tags or ():
        if tag not in known:
            raise ConfigError(f"tags has {tag!r}: use {', '.join(known)}, or leave them out for all")
    return list(known if not tags else [tags] if isinstance(tags, str) else tags)
