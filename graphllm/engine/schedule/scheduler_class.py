"""The class of a core's scheduler: ours, or the user's own (setting ``scheduler_cls``)."""

from __future__ import annotations

from graphllm.config import ConfigError, SchedulerConfig
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.host.importing import imported


def scheduler_class(options: SchedulerConfig) -> type[Scheduler]:
    """The scheduler, or the user's own. Raises ConfigError for what is none."""
    policy = Scheduler if options.scheduler_cls is None else imported("scheduler_cls", options.scheduler_cls)
    if not (isinstance(policy, type) and issubclass(policy, Scheduler)):
        raise ConfigError(
            f"scheduler_cls is {options.scheduler_cls!r}: give a subclass of "
            "graphllm.engine.schedule.scheduler.Scheduler"
        )
    return policy
