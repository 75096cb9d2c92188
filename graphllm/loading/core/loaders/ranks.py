"""An engine core on several ranks: this process is rank 0, and the others load at the same time."""

from __future__ import annotations

import weakref

from graphllm.engine.core import EngineCore
from graphllm.loading.core.core_start import CoreStart
from graphllm.loading.core.loaders.device import DeviceLoader
from graphllm.loading.core.loaders.join_ranks import join_ranks
from graphllm.loading.core.ranks import StartedRanks
from graphllm.runtime.executor import Executor


class RanksLoader(DeviceLoader):
    """As on one device, for this rank's share."""

    def __init__(self, start: CoreStart, ranks: StartedRanks) -> None:
        super().__init__(start)
        self._ranks = ranks

    def executor(self) -> Executor:
        start = self._start
        executor = join_ranks(self._ranks, start, self._device, self._loading.tensors, self._threads, self._memory)
        start.undo.callback(executor.close)
        self._let_sleep(executor)
        return executor

    def core(self, executor: Executor) -> EngineCore:
        core = super().core(executor)
        # For a core that nobody closes: the process could not leave the groups of its GPUs.
        weakref.finalize(core, executor.close)
        return core


def open_loader(start: CoreStart) -> RanksLoader:
    """Raises ConfigError where there are not enough devices."""
    assert start.ranks is not None
    return RanksLoader(start, start.ranks)
