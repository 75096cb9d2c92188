"""Which steps a core has in flight at once, seen at its scheduler and its executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from graphllm.engine.schedule.scheduler_output import SchedulerOutput


class WatchedSteps(NamedTuple):
    """in_flight: the plans of the steps that were started and not yet waited for, oldest first. overlaps: of each step,
    the plans of the steps in flight that it takes no token of, then its own."""

    in_flight: list[SchedulerOutput]
    overlaps: list[list[SchedulerOutput]]


@contextlib.contextmanager
def watched_steps(core: Any) -> Iterator[WatchedSteps]:
    """Watch the steps that an EngineCore plans and starts within the block."""
    steps = WatchedSteps([], [])
    planned: list[SchedulerOutput] = []
    plan_next, start = core.scheduler.next, core.executor.start

    def watched_next() -> SchedulerOutput | None:
        plan: SchedulerOutput | None = plan_next()
        if plan is not None:
            planned.append(plan)
        return plan

    def watched_start(*given: Any, **named: Any) -> Any:
        plan = planned[-1]
        count = plan.num_independent
        steps.overlaps.append([*(steps.in_flight[-count:] if count else ()), plan])
        handle = start(*given, **named)
        steps.in_flight.append(plan)
        wait = handle.wait

        def watched_wait() -> Any:
            steps.in_flight[:] = [other for other in steps.in_flight if other is not plan]
            return wait()

        handle.wait = watched_wait
        return handle

    core.scheduler.next, core.executor.start = watched_next, watched_start
    try:
        yield steps
    finally:
        core.scheduler.next, core.executor.start = plan_next, start
