"""Events of the prefix cache: what it holds now and what no more, published after each step for routers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from graphllm.config.cache.kv_events import KVEventsConfig
from graphllm.engine.events.chains import Chains
from graphllm.engine.events.event_encoder import EventEncoder, described
from graphllm.engine.events.event_log import EventLog
from graphllm.engine.parts.part import Kept, Part, PartContext
from graphllm.engine.requests.request import CoreStats
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.started_step import StartedStep
from graphllm.runtime.commands.command import Command

if TYPE_CHECKING:
    from graphllm.runtime.step_handle import StepResult

_log = logging.getLogger(__name__)


class Events(Part):
    """Hears the pools of the cache, and hands a batch to the publisher where something has happened."""

    name = "events"

    def __init__(self, context: PartContext) -> None:
        from graphllm.engine.events.zmq_publisher import ZmqPublisher  # zmq: an engine without events needs none

        super().__init__(context)
        cache, rank = context.scheduler.cache, context.setup.rank
        if not cache.caching:
            _log.warning("kv_events_config: the prefix cache is off, so there are no events of it")
        groups = described(context.executor.layout, cache.boundary)
        self._chains = Chains(context.scheduler)
        self._events = EventLog(self._chains, [group.block_size for group in groups])
        self._events.listen(cache.pool)
        for snapshots in cache.states.pools:
            self._events.listen(snapshots.pool, len(cache.groups))
        self._taken: SchedulerOutput | None = None  # the plan of the step whose result is taken now
        config = KVEventsConfig.read(context.options.kv_events_config).of_rank(rank)
        self._rank, self._publisher = rank, ZmqPublisher(config, EventEncoder(groups, rank).encode)

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return KVEventsConfig.read(context.options.kv_events_config).enabled

    def planned(self, plan: SchedulerOutput | None) -> None:
        if plan is None:  # it may have taken blocks all the same
            self._publish()
        elif plan.admitted:
            self._chains.begin(plan)

    def arrived(self, step: StartedStep, result: StepResult) -> None:
        self._taken = step.plan

    def committed(self) -> None:
        self._publish(self._taken)

    def started(self, step: StartedStep) -> Iterable[Command]:
        self._publish()  # nothing is left, unless no step before it has ended just now
        return ()

    def reset(self, where: Kept) -> None:
        self._publish()

    def stats(self, into: CoreStats) -> None:
        publisher = self._publisher
        into.kv_event_batches, into.kv_event_batches_dropped = publisher.batches, publisher.dropped
        into.kv_events = {"data_parallel_rank": self._rank, **dataclasses.asdict(publisher.config)}

    def close(self) -> None:
        self._publish()
        self._publisher.close()

    def _publish(self, plan: SchedulerOutput | None = None) -> None:
        """plan: of the step whose result was just taken."""
        if self._events:
            self._publisher.publish(self._events.take(plan))
