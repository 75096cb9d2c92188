"""`CoreStart`: an engine core that is being loaded, as the stages of `graphllm.loading.core.load` hand it on. No
torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from graphllm.config import CompileConfig, CoreConfig
from graphllm.loading.core.place import RankPlace
from graphllm.loading.core.ranks import StartedRanks
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.loading.memory import CacheCounts
from graphllm.program.artifact import Artifact
from graphllm.program.manifest import MemoryTable
from graphllm.runtime.memory.cpu_cache_memory import CacheMemory

if TYPE_CHECKING:
    from graphllm.engine.core import EngineCore
    from graphllm.engine.requests.options import LogitsProcessor
    from graphllm.runtime.cuda.functions import CudaFunctions
    from graphllm.runtime.executor import Executor
    from graphllm.weights.loading.early_reading import EarlyWeights


@dataclass(frozen=True)
class EarlyStart:
    """What has begun; None for what has not."""

    functions: CudaFunctions | None = None
    weights: EarlyWeights | None = None

    def close(self) -> None:
        """Read no more."""
        if self.weights is not None:
            self.weights.close()


@dataclass
class CoreStart:
    """What is known of a core while it is loaded.

    config: the settings; with several nodes, the number of them that there are.
    artifact: what runs, verified.
    stored: what the parameters are made of.
    place: of this process among the ranks.
    memory: what this process takes, by the manifest.
    processors: further logits processors, as objects.
    clock: is called with the name of a phase that ends, or a part of it.
    undo: ends what has begun, when loading fails.
    during: ends when loading ends, however it does.
    ranks: the other ranks, which load at the same time; None where there are none.
    counts: blocks and snapshots of the cache; None on a GPU, where the weights come first.
    cache: a CPU's paged cache; None for a model without one.
    early: what has begun before torch was there.
    """

    config: CoreConfig
    artifact: Artifact
    stored: StoredWeights
    place: RankPlace
    memory: MemoryTable
    processors: Sequence[LogitsProcessor]
    clock: Callable[[str], None]
    undo: contextlib.ExitStack
    during: contextlib.ExitStack
    ranks: StartedRanks | None = None
    counts: CacheCounts | None = None
    cache: CacheMemory | None = None
    early: EarlyStart = field(default_factory=EarlyStart)

    @property
    def compiled(self) -> CompileConfig:
        """What the artifact was compiled for."""
        return self.artifact.config


class Loader(Protocol):
    """The stages of one way to load a core, called in this order."""

    def weights(self) -> None:
        """Have the parameters loaded; on a GPU they may still be being read."""

    def executor(self) -> Executor:
        """What runs the artifact. Raises ConfigError when memory does not suffice, RankError when a rank dies."""

    def core(self, executor: Executor) -> EngineCore:
        """The engine core, when all parameters are there."""
