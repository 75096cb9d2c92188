"""Loading an engine core, in stages: verify -> place -> weights -> executor -> core. The stage "place" chooses the
loader, which has the later stages. No torch before a loader that needs it is chosen."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graphllm.config import ConfigError, CoreConfig
from graphllm.host.garbage_collection import keep_all, no_collections
from graphllm.loading.core.core_start import CoreStart, EarlyStart, Loader
from graphllm.loading.core.place import rank_place, stage_memory
from graphllm.loading.core.ranks import start_ranks
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.loading.memory import cache_counts, cpu_cache_memory
from graphllm.program.artifact import Artifact
from graphllm.runtime.ranks.rank_processes import WaitingRanks

if TYPE_CHECKING:
    from graphllm.engine.core import EngineCore
    from graphllm.engine.requests.options import LogitsProcessor

_EARLY = "graphllm.loading.core.early_start"  # reads files of weights, and drives a GPU
_LOADERS = "graphllm.loading.core.loaders"  # one module each; its `open_loader` gives a `Loader`, or None


@no_collections()
def load_core(
    config: CoreConfig,
    phases: Callable[[str, float], None] = lambda name, seconds: None,
    processors: Sequence[LogitsProcessor] = (),
    exits: bool = False,
    waiting: WaitingRanks | None = None,
    begun: EarlyStart | None = None,
) -> EngineCore:
    """Load weights, open the artifact and make an engine core.

    phases: is called with the name and the seconds of each start-up phase.
    processors: further logits processors, as objects.
    exits: the process is the core's own: it ends when a rank dies, as its threads wait for that rank in vain.
    waiting: processes for the other ranks.
    begun: what has begun already.

    Raises ConfigError when memory does not suffice, RankError when a rank dies.
    """
    with contextlib.ExitStack() as during, contextlib.ExitStack() as undo:
        start = _verify(config, processors, _Phases(phases), undo, during)
        loader = _place(start, exits, waiting, begun)
        loader.weights()
        executor = loader.executor()
        core = loader.core(executor)
        undo.pop_all()
        return core


def _verify(
    config: CoreConfig,
    processors: Sequence[LogitsProcessor],
    clock: Callable[[str], None],
    undo: contextlib.ExitStack,
    during: contextlib.ExitStack,
) -> CoreStart:
    """Open the artifact. Raises ConfigError where it is damaged, or does not fit the settings."""
    artifact = Artifact.open(Path(config.load.artifact))
    _check_peers(config, artifact.config.data_parallel_experts)
    place = rank_place(config, artifact.config.tensor_parallel_size, 0)
    stored = StoredWeights(config, artifact)
    memory = stage_memory(stored, place.stage)
    return CoreStart(config, artifact, stored, place, memory, processors, clock, undo, during)


def _place(start: CoreStart, exits: bool, waiting: WaitingRanks | None, begun: EarlyStart | None) -> Loader:
    """Start the other ranks, and what needs no torch; then choose the loader."""
    start.ranks = start_ranks(start.config, start.place.degree, start.undo, exits, waiting)
    if start.ranks is not None:
        start.config = start.ranks.config
        start.place = rank_place(start.config, start.compiled.tensor_parallel_size, 0)
    elif start.artifact.device == "cpu":
        processes = start.config.parallel.data_parallel_size
        start.counts = cache_counts(start.compiled, start.memory, start.config.cache, processes)
        start.cache = cpu_cache_memory(start.artifact.program.blocks, start.counts)
    for name in _candidates(start):
        if name != "host":
            _prepare_torch(start, begun)
        loader: Loader | None = importlib.import_module(f"{_LOADERS}.{name}").open_loader(start)
        if loader is not None:
            return loader
    raise AssertionError("the last candidate always loads")


def _candidates(start: CoreStart) -> Iterator[Literal["host", "device", "ranks"]]:
    """The modules of loaders that may load this core, the best first."""
    if start.ranks is not None:
        yield "ranks"
        return
    config = start.config
    shares = config.peers is not None
    processors = bool(start.processors or config.model.logits_processors)  # they edit torch tensors
    if start.artifact.device == "cpu" and not shares and not processors:
        yield "host"
    yield "device"


def _prepare_torch(start: CoreStart, begun: EarlyStart | None) -> None:
    """Begin what takes the time of importing torch, and import it."""
    if begun is None:  # where torch is there, nothing is gained, and its current device may not be the first
        begun = EarlyStart() if "torch" in sys.modules else importlib.import_module(_EARLY).begin_early(start.stored)
    start.early = begun
    start.undo.callback(begun.close)
    start.clock("artifact")
    # In a thread: tracebacks of what the import tries are kept, and hold the frames of all who called for it.
    if "torch" not in sys.modules:
        with ThreadPoolExecutor(1, "graphllm-import") as importing:
            importing.submit(importlib.import_module, "torch").result()
        keep_all()
    start.clock("import torch")


def _check_peers(config: CoreConfig, sharing: int) -> None:
    """Raise ConfigError where there are other cores than the artifact was compiled for."""
    there = 1 if config.peers is None else config.peers.count
    if there != sharing:
        raise ConfigError(
            f"data_parallel_experts is {sharing}: the artifact is of as many engine cores, and here is {there}; use "
            f"data_parallel_size {sharing} in one engine, or compile without enable_expert_parallel"
        )
    if sharing > 1 and config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {config.parallel.pipeline_parallel_size}: engine cores that share experts have "
            "one stage; use 1"
        )


class _Phases:
    def __init__(self, report: Callable[[str, float], None]) -> None:
        self._report, self._last = report, time.perf_counter()
        self._seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        """A phase ends, or a part of it."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._report(name, self._seconds[name])
        self._last = now
