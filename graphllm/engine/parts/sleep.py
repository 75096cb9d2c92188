"""Sleep: an engine core gives back the memory of weights and cache, and takes it again under the same addresses.

It falls asleep in two moves. `pause` ends or stops what runs, and holds back what comes; the core steps on until it is
`quiet`. Then `sleep` acts on the memory. It wakes up in two moves as well: `wake` has the memory again, and `resume`
lets requests run. So several cores can make each move together, and none steps before all of them can.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from graphllm.config import ConfigError
from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.process.sleep_orders import MODES, NAME, PAUSE, WOKEN, SleepError
from graphllm.engine.requests.request import CoreStats, EngineCoreOutput, EngineRequest, QueueFullError
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.resource import Resource
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.started_step import StartedStep
from graphllm.runtime.commands.command import Answered
from graphllm.runtime.commands.sleep import Awake, FallAsleep, NeverSleep, PutBack
from graphllm.runtime.sleeping.rank_sleep import CACHE, TAGS, WEIGHTS

_NAP = 0.01  # seconds of a step of a core that waits to be woken up, while requests wait in it


class AsleepError(QueueFullError):
    """Requests are refused while the engine sleeps."""

    retry_after = 5


class Gate(Resource):
    """Holds requests back while it is closed. refuses: new ones get an error then."""

    def __init__(self, refuses: bool) -> None:
        self._refuses, self.closed = refuses, False

    def check(self, request: EngineRequest) -> None:
        if self.closed and self._refuses:
            raise AsleepError("the engine is asleep; wake it up, or send the request again later")

    def acquire(self, state: RequestState) -> bool:
        return not self.closed


class Sleep(Part):
    """asleep: tags of memory that is given back. level: of the sleep; 0 for a pause."""

    name: ClassVar[str] = NAME

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self.resource = self._gate = Gate(context.setup.sleep.requests_while_asleep == "refuse")
        self.asleep: tuple[str, ...] = ()
        self.level = PAUSE
        self._ended: list[EngineCoreOutput] = []
        self._in_flight = 0
        self._waits = False  # the core steps on, until what holds blocks of the cache lets go of them

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return context.setup.sleep.enable_sleep_mode

    # Falling asleep

    def pause(self, mode: str) -> None:
        """Hold back all requests without a slot. mode, for those with one: abort ends them, and those that wait; wait
        lets them finish; keep takes their slots, and they go on after waking up."""
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}: use one of {', '.join(MODES)}")
        before, self._gate.closed = self._gate.closed, True
        scheduler = self.context.scheduler
        if mode == "abort":  # what has come since the engine sleeps waits for its waking, however often it is sent off
            ids = [state.request.id for state in scheduler.states if state.slot >= 0 or not before]
            self._ended += [EngineCoreOutput(state.request.id, [], "abort") for state in scheduler.abort(ids)]
        elif mode == "keep":
            for state in [state for state in scheduler.states if state.slot >= 0]:
                scheduler.preempt(state)

    @property
    def paused(self) -> bool:
        """Whether requests are held back."""
        return self._gate.closed

    def is_quiet(self) -> bool:
        """Whether it is paused, and nothing runs any more, here or on cores that step together with this one. From then
        on requests that come here do not make those cores step."""
        if not self._is_drained():
            return False
        if (waves := self.context.setup.waves) is not None:
            waves.quiet = True
            return not waves.running
        return True

    def sleep(self, level: int, tags: Sequence[str], forget: Callable[[], bool]) -> list[str] | None:
        """Give back the memory of these tags on every rank; the tags that were awake. None: not yet, because something
        holds blocks of the cache. forget: empties the cache; whether it could.

        Raises ConfigError for what cannot be, SleepError where a rank could not; nothing has changed then.
        """
        if not self.is_quiet():
            raise ConfigError(WOKEN)
        if WEIGHTS in self.asleep and level not in (PAUSE, self.level):
            raise ConfigError(f"level is {level}: the engine sleeps at level {self.level}; wake it up first")
        if CACHE in tags and CACHE not in self.asleep:
            self._waits = not forget()
            if self._waits:
                return None
        answers = self.context.executor.ask(FallAsleep(max(1, level), list(tags))) if tags else []
        found = self._all(answers, "sleep", self._take_back)
        self.asleep = tuple(tag for tag in TAGS if tag in {*self.asleep, *found})
        self.level = level if WEIGHTS in found else max(self.level, level)
        return found

    # Waking up

    def wake(self, tags: Sequence[str]) -> list[str]:
        """Have the memory of these tags again; the tags that were asleep. Raises SleepError where a rank could not; all
        that slept is asleep then."""
        wanted = [tag for tag in TAGS if tag in tags and tag in self.asleep]
        answers = self.context.executor.ask(Awake(wanted)) if wanted else []
        found = self._all(answers, "wake_up", self.put_back)
        self.asleep = tuple(tag for tag in self.asleep if tag not in found)
        return found

    def put_back(self, tags: Sequence[str]) -> None:
        """Give back what `wake` has taken: another core could not."""
        answers = self.context.executor.ask(PutBack(list(tags)))
        self.asleep = tuple(tag for tag in TAGS if tag in {*self.asleep, *tags})
        self._all(answers, "sleep", lambda tags: None)

    def resume(self) -> bool:
        """Let requests run, unless memory is missing; whether they do."""
        if self.asleep:
            return False
        self._gate.closed, self._waits, self.level = False, False, PAUSE
        if (waves := self.context.setup.waves) is not None:
            waves.quiet = False
            if self.context.scheduler.unfinished:
                waves.begin()
        return True

    def _take_back(self, tags: Sequence[str]) -> None:
        self._all(self.context.executor.ask(Awake(list(tags))), "wake_up", lambda tags: None)

    def _all(self, answers: Sequence[Answered], what: str, undo: Callable[[Sequence[str]], None]) -> list[str]:
        """What the ranks have answered alike. Where one failed, the others undo it, and SleepError is raised."""
        failed = [f"rank {rank}: {a.error}" for rank, a in enumerate(answers) if a.error is not None]
        done: list[Any] = [a.value for a in answers if a.error is None]
        found = sorted({tag for tags in done for tag in tags or ()}, key=TAGS.index)
        if failed:
            if found:
                undo(found)
            state = "asleep" if what == "wake_up" else "awake"
            one = failed[0].removeprefix("rank 0: ") if len(answers) == 1 else failed[0]
            raise SleepError(f"{what}: {one}; the engine is {state} as before")
        return found

    # Moments of a step

    @property
    def busy(self) -> bool:  # type: ignore[override]
        return bool(self._ended) or self._waits

    def gather(self, idle: bool) -> Iterable[EngineRequest | EngineCoreOutput]:
        if not self._gate.closed:
            return ()
        if self.is_quiet():
            self.context.executor.check_health()
            time.sleep(_NAP)
        ended, self._ended = self._ended, []
        return ended

    def planned(self, plan: SchedulerOutput | None) -> None:
        assert plan is None or not self.asleep, "a step while the engine sleeps"

    def started(self, step: StartedStep) -> Iterable[Any]:
        self._in_flight += 1
        return ()

    def arrived(self, step: StartedStep, result: Any) -> None:
        self._in_flight -= 1

    def stats(self, into: CoreStats) -> None:
        into.sleep_level = self.level if self.asleep else PAUSE
        into.paused = self._gate.closed

    def close(self) -> None:
        with contextlib.suppress(Exception):  # after a failure of the steps nobody is there
            self.context.executor.do(NeverSleep())

    def _is_drained(self) -> bool:
        return self.paused and not (self.context.scheduler.running or self._in_flight or self._ended)
