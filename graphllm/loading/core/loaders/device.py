"""An engine core on one device with torch: a GPU, or a CPU where the model needs torch. Of cores that share experts,
each is loaded so."""

from __future__ import annotations

from graphllm.engine.core import EngineCore
from graphllm.loading.core.core_start import CoreStart
from graphllm.loading.core.loaders.make_core import make_core
from graphllm.loading.core.loaders.sleeping import let_sleep, parameters, sleep_memory
from graphllm.loading.core.rank_device import begin_weights, free_memory, rank_device, rank_threads
from graphllm.loading.memory import cache_counts
from graphllm.runtime.executor import Executor
from graphllm.runtime.stream import alone as single_threaded


class DeviceLoader:
    """Loads torch tensors."""

    def __init__(self, start: CoreStart) -> None:
        self._start = start
        self._threads = rank_threads(start.config, start.place.here)  # of the process; from here on this thread has one
        start.during.enter_context(single_threaded())
        self._device = rank_device(start.artifact.device, start.place)

    def weights(self) -> None:
        start = self._start
        self._memory = sleep_memory(start.config, self._device, start.place)
        into = parameters(self._memory, start.stored, start.place)
        begun = begin_weights(start.stored, self._device, start.place, start.early.weights, into)
        self._loading = start.undo.enter_context(begun)
        if start.ranks is not None or start.config.peers is not None:
            self._loading.finish()  # others wait for this process where it waits for them
        start.clock("weights")

    def executor(self) -> Executor:
        start = self._start
        counts = start.counts
        if counts is None:  # on a GPU, of what the weights have left
            counts = cache_counts(start.compiled, start.memory, start.config.cache, gpu=free_memory(self._device))
        executor = Executor(
            start.artifact, self._loading.tensors, counts.blocks, counts.snapshots, self._threads, start.cache,
            memory=self._memory, functions=start.early.functions,
        )  # fmt: skip
        self._let_sleep(executor)
        return executor

    def _let_sleep(self, executor: Executor) -> None:
        start = self._start
        stored, device, place, tensors = start.stored, self._device, start.place, self._loading.tensors

        def reload() -> None:
            with begin_weights(stored, device, place, into=tensors) as loading:
                loading.finish()

        let_sleep(start.config, executor, reload, stored.is_baked and device.type == "cpu", self._memory)

    def core(self, executor: Executor) -> EngineCore:
        start, waves = self._start, None
        if start.config.peers is not None:
            from graphllm.loading.core.rank import join_cores  # with what only several processes need

            waves = join_cores(start.config.peers, self._device)
            start.undo.callback(waves.close)
            start.clock("join the cores")
        core = make_core(start, executor, waves)
        if start.ranks is None and waves is None:
            start.undo.callback(core.close)
        self._loading.finish()
        start.clock("weights")
        return core


def open_loader(start: CoreStart) -> DeviceLoader:
    """Raises ConfigError where there is no such device."""
    return DeviceLoader(start)
