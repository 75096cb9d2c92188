"""States between steps: blocks that are copied when sequences part, slots of recurrent states and their snapshots, and
prefixes of the cache that go to other engine cores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphllm.engine.parts.part import Part
from graphllm.engine.requests.request import CacheEntry, EngineRequest
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.device_states import export_prefix, import_prefix
from graphllm.engine.step.started_step import StartedStep
from graphllm.runtime.commands.command import Command
from graphllm.runtime.commands.states import CopyBlocks, LoadSnapshots, ResetSlots, SaveSnapshots


class Snapshots(Part):
    """What is copied where, the scheduler's cache says."""

    name = "snapshots"

    def before(self, plan: SchedulerOutput) -> Iterable[Command]:
        found: list[Command] = []
        if plan.copies:
            found.append(CopyBlocks(list(plan.copies)))
        if plan.resets:
            found.append(ResetSlots(list(plan.resets)))
        if plan.snapshot_loads:
            found.append(LoadSnapshots(list(plan.snapshot_loads)))
        return found

    def started(self, step: StartedStep) -> Iterable[Command]:
        return [SaveSnapshots(list(step.plan.snapshot_saves))] if step.plan.snapshot_saves else ()

    def export_cache(self, request: EngineRequest) -> list[CacheEntry]:
        """What the cache has of a request's prompt: blocks up to its last block boundary, and the snapshot there."""
        return export_prefix(self.context.executor, self.context.scheduler.cache, request)

    def import_cache(self, entries: Sequence[CacheEntry]) -> int:
        """Have requests find what another core exported, one with the same artifact and ``cache_secret``; how many of
        the entries were new. Raises ConfigError."""
        return import_prefix(self.context.executor, self.context.scheduler.cache, entries)
