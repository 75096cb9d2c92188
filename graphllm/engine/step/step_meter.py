"""StepMeter: counters of a core's steps, and the gauges of its scheduler."""

from __future__ import annotations

import time

from graphllm.engine.requests.request import BucketStats, CoreStats
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.step.started_step import StartedStep
from graphllm.engine.step.step_executor import StepExecutor


class StepMeter:
    """stats: what it counts; parts count there, too."""

    def __init__(self, executor: StepExecutor) -> None:
        self._ended = time.monotonic()  # the last step
        self.stats = CoreStats(
            started=self._ended,
            total_blocks=executor.layout.num_blocks - 1,
            buckets={b.name: BucketStats() for b in executor.buckets},
        )

    def measure(self, step: StartedStep) -> None:
        """Count a step that has given its result just now. Its time begins at its start, or, if that is later, at the
        end of the step before it: until then the host had both in flight."""
        now = time.monotonic()
        bucket, tokens = self.stats.buckets[step.handle.size.bucket.name], step.batch.step.tokens
        step.seconds = now - max(step.begun, self._ended)
        bucket.seconds.observe(step.seconds)
        bucket.tokens += tokens
        bucket.padding += step.handle.size.T - tokens
        self.stats.step_tokens.observe(tokens)
        self._ended = now

    def count_end(self, reason: str | None) -> None:
        """A request has ended."""
        self.stats.finished[str(reason)] = self.stats.finished.get(str(reason), 0) + 1

    def read(self, scheduler: Scheduler, held: int) -> CoreStats:
        """Set the gauges. held: requests that parts keep back."""
        stats = self.stats
        stats.running = scheduler.running
        stats.waiting = scheduler.waiting + held
        stats.free_blocks = scheduler.cache.pool.free_blocks
        stats.kv_usage = 1 - stats.free_blocks / max(stats.total_blocks, 1)
        admission = scheduler.admission
        stats.prefix_queries, stats.prefix_hits = admission.prefix_queries, admission.prefix_hits
        stats.prefix_hits_without_state = admission.prefix_hits_without_state
        stats.preemptions = scheduler.preemptions
        return stats
