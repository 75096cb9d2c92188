"""LoRA adapters: a thread reads their tables from files while steps run; a step's tables are written before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.parts.part import WAIT, Part, PartContext
from graphllm.engine.requests.request import Adapter, CoreStats, EngineCoreOutput, EngineRequest
from graphllm.engine.schedule.adapter_table import NO_TABLES, AdapterTable, fail_waiting
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.adapter_memory import AdapterMemory
from graphllm.engine.step.device_states import adapter_tables
from graphllm.runtime.commands.adapters import WriteAdapter
from graphllm.runtime.commands.command import Command, TensorData


class Adapters(Part):
    """memory: the tables in the host's memory. resource: says which of them lie on the device."""

    name = "adapters"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        count = context.executor.layout.max_adapters
        self.resource = self._table = AdapterTable(count)
        self.memory = context.setup.adapters or AdapterMemory(count, _no_files)

    def gather(self, idle: bool) -> Iterable[EngineRequest | EngineCoreOutput]:
        """Take in adapters that have been read."""
        table = self._table
        if not table.count:
            return ()
        wanted = table.wanted
        if wanted and idle:
            self.memory.wait(WAIT)
        failed = self.memory.take([adapter.digest for adapter in wanted])
        table.in_memory = self.memory.digests
        return [
            EngineCoreOutput(state.request.id, [], "error", error=error)
            for digest, error in failed.items()
            for state in fail_waiting(self.context.scheduler, table, digest, error)
        ]

    def planned(self, plan: SchedulerOutput | None) -> None:
        if self._table.count:
            self.memory.request(self._table.wanted)

    def before(self, plan: SchedulerOutput) -> Iterable[Command]:
        return [
            WriteAdapter(entry, {name: TensorData(table) for name, table in self.memory[digest].items()})
            for entry, digest in self._table.writes()
        ]

    def put(self, digest: str, values: Mapping[str, np.ndarray]) -> None:
        """Keep tables for requests with the adapter of this digest, by the names of their states. A table is zero after
        the beginning that is given. Raises ConfigError for what no table can hold."""
        if not self._table.count:
            raise ConfigError(NO_TABLES)
        self.memory.put(digest, adapter_tables(self.context.executor, digest, values))

    def stats(self, into: CoreStats) -> None:
        if self._table.count and self.context.executor.adapted:
            into.max_adapters = self._table.count
        into.adapters_running, into.adapters_waiting = self._names(running=True), self._names(running=False)

    def close(self) -> None:
        self.memory.close()

    def _names(self, running: bool) -> list[str]:
        """Of the adapters that requests with, or without, a slot have."""
        if not self._table.count:
            return []
        states = self.context.scheduler.states
        return sorted({s.request.adapter.name for s in states if s.request.adapter and (s.slot >= 0) == running})


def _no_files(adapter: Adapter) -> NoReturn:
    raise ConfigError(f"adapter {adapter.name!r}: this engine reads no adapters from files; give its tables")
