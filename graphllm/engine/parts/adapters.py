"""LoRA adapters: their tables are read from files beside the steps, and written to the device before a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.parts.part import WAIT, Part, PartContext
from graphllm.engine.requests.request import Adapter, CoreStats, EngineCoreOutput, EngineRequest
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.adapter_memory import AdapterMemory
from graphllm.engine.step.device_states import adapter_tables
from graphllm.runtime.commands.adapters import WriteAdapter
from graphllm.runtime.commands.command import Command, TensorData


class Adapters(Part):
    """memory: the tables in the host's memory."""

    name = "adapters"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self.memory = context.setup.adapters or AdapterMemory(context.executor.layout.max_adapters, _no_files)

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return context.executor.layout.max_adapters > 0

    def gather(self, idle: bool) -> Iterable[EngineRequest | EngineCoreOutput]:
        """Take in adapters that have been read."""
        scheduler = self.context.scheduler
        table = scheduler.adapters
        wanted = table.wanted
        if wanted and idle:
            self.memory.wait(WAIT)
        failed = self.memory.take([adapter.digest for adapter in wanted])
        table.in_memory = self.memory.digests
        return [
            EngineCoreOutput(state.request.id, [], "error", error=error)
            for digest, error in failed.items()
            for state in scheduler.fail_adapter(digest, error)
        ]

    def planned(self, plan: SchedulerOutput | None) -> None:
        self.memory.request(self.context.scheduler.adapters.wanted)

    def before(self, plan: SchedulerOutput) -> Iterable[Command]:
        return [
            WriteAdapter(entry, {name: TensorData(table) for name, table in self.memory[digest].items()})
            for entry, digest in plan.adapters
        ]

    def put(self, digest: str, values: Mapping[str, np.ndarray]) -> None:
        """Keep tables for requests whose adapter has this digest, by the names of their states. A table is zero but for
        the beginning that is given. Raises ConfigError for what no table can hold."""
        self.memory.put(digest, adapter_tables(self.context.executor, digest, values))

    def stats(self, into: CoreStats) -> None:
        scheduler = self.context.scheduler
        into.max_adapters = scheduler.adapters.count if self.context.executor.adapted else 0
        into.adapters_running, into.adapters_waiting = scheduler.adapter_names()

    def close(self) -> None:
        self.memory.close()


def _no_files(adapter: Adapter) -> NoReturn:
    raise ConfigError(f"adapter {adapter.name!r}: this engine reads no adapters from files; give its tables")
