"""An engine core on a CPU without torch: importing it takes longer than the rest of a start, and most of its memory.
This is for programs that are compiled kernels throughout, with weights that `graphllm.weights.loading.host_loader`
loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from graphllm.engine.core import EngineCore
from graphllm.loading.core.core_start import CoreStart
from graphllm.loading.core.loaders.make_core import make_core
from graphllm.loading.core.loaders.sleeping import let_sleep
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program.program import Program
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.memory import HostMemory
from graphllm.runtime.stream import nothing
from graphllm.weights.loading.baked_on_host import open_on_host
from graphllm.weights.loading.host_array import HostArray
from graphllm.weights.loading.host_loader import host_loader

Load = Callable[..., Mapping[str, HostArray]]


class HostLoader:
    """Loads numpy arrays."""

    def __init__(self, start: CoreStart, load: Load) -> None:
        self._start, self._load = start, load
        self._weights: Mapping[str, HostArray] = {}

    def weights(self) -> None:
        self._weights = self._load()
        self._start.clock("weights")

    def executor(self) -> Executor:
        start = self._start
        assert start.counts is not None
        blocks, snapshots = start.counts
        threads = start.config.load.threads
        executor = Executor(start.artifact, self._weights, blocks, snapshots, threads, start.cache, memory=HostMemory())
        is_file = start.stored.is_baked
        reload = nothing if is_file else functools.partial(self._load, self._weights)
        let_sleep(start.config, executor, reload, is_file)
        return executor

    def core(self, executor: Executor) -> EngineCore:
        return make_core(self._start, executor)


def open_loader(start: CoreStart) -> HostLoader | None:
    """None for a core that needs torch, or may."""
    if _needs_torch(start.artifact.program):
        return None
    load = _weights(start.stored)
    if load is None:
        return None
    start.clock("artifact")
    return HostLoader(start, load)


def _needs_torch(program: Program) -> bool:
    return bool(program.torch or program.recurrent or program.adapted or program.experts or len(program.graphs) > 1)


def _weights(stored: StoredWeights) -> Load | None:
    """What loads them; None where that needs torch."""
    if stored.is_baked:
        return functools.partial(open_on_host, stored.artifact.folder)
    checkpoint = stored.tensors.checkpoint
    loader = None if checkpoint is None else host_loader(stored.plan, checkpoint, stored.artifact.libraries)
    return None if loader is None else loader.load
