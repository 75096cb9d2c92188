"""An engine core on a CPU without torch, whose import takes longer than the rest of a start and most of its memory: for
models whose programs are compiled kernels throughout, with weights that `graphllm.weights.loading.host_loader` can
load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from graphllm.config import CoreConfig
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.loading.memory import CacheCounts
from graphllm.program.artifact import Artifact
from graphllm.runtime.memory.cpu_cache_memory import CacheMemory
from graphllm.weights.loading import baked
from graphllm.weights.loading.host_array import HostArray
from graphllm.weights.loading.host_loader import host_loader

if TYPE_CHECKING:
    from graphllm.runtime.executor import Executor


def without_torch(config: CoreConfig, artifact: Artifact) -> Callable[[], Mapping[str, HostArray]] | None:
    """What loads the weights of a core that needs no torch; None for one that does, or may."""
    alone = config.peers is None and not config.model.logits_processors
    if artifact.device != "cpu" or not alone:
        return None
    program = artifact.program
    if program.torch or program.recurrent or program.adapted or program.experts or len(program.graphs) > 1:
        return None
    stored = StoredWeights(config, artifact)
    if stored.is_baked:
        return functools.partial(baked.open_on_host, artifact.folder)
    if stored.tensors.checkpoint is None:
        return None
    loader = host_loader(stored.plan, stored.tensors.checkpoint, stored.kernels)
    return None if loader is None else loader.load


def host_executor(
    artifact: Artifact,
    threads: int | None,
    weights: Mapping[str, HostArray],
    counts: CacheCounts,
    cache: CacheMemory | None,
) -> Executor:
    """Runs the artifact."""
    from graphllm.runtime.executor import Executor
    from graphllm.runtime.memory.memory import HostMemory

    return Executor(artifact, weights, counts.blocks, counts.snapshots, threads, cache, memory=HostMemory())
