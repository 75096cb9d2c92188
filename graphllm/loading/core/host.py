"""An engine core on a CPU without torch, whose import takes longer than the rest of a start and most of its memory: for
models whose programs are compiled kernels throughout, with weights that `graphllm.weights.loading.host_loader` can
load."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphllm.config import CoreConfig
from graphllm.loading.checkpoint.source import open_tensors
from graphllm.loading.memory import CacheCounts
from graphllm.program import baked_table
from graphllm.program.states import place_from
from graphllm.runtime.memory.cpu_cache_memory import CacheMemory
from graphllm.weights.formats.integers import KERNELS
from graphllm.weights.loading import baked
from graphllm.weights.loading.host_array import HostArray
from graphllm.weights.loading.host_loader import host_loader
from graphllm.weights.plan.plan import WeightPlan

if TYPE_CHECKING:
    from graphllm.runtime.executor import Executor


def without_torch(config: CoreConfig, manifest: Mapping[str, Any]) -> Callable[[], Mapping[str, HostArray]] | None:
    """What loads the weights of a core that needs no torch; None for one that does, or may."""
    artifact = Path(config.load.artifact)
    alone = config.peers is None and not config.model.logits_processors
    if manifest["factors"]["compile"]["target"]["device"] != "cpu" or not alone:
        return None
    program = json.loads((artifact / "program.json").read_text())
    recurrent = any(place_from(p).retention == "last" for p in program["states"].values())
    more = recurrent or program["adapted"] or program["experts"] or len(program["graphs"]) > 1
    if program.get("torch", True) or more:
        return None
    if baked_table.is_baked(artifact):
        return functools.partial(baked.open_on_host, artifact)
    checkpoint, _ = open_tensors(Path(config.model.model), config.load.load_format, config.model.speculative_model)
    if checkpoint is None:
        return None
    plan = WeightPlan.from_json((artifact / "weights.json").read_text())
    loader = host_loader(plan, checkpoint, artifact / KERNELS)
    return None if loader is None else loader.load


def host_executor(
    config: CoreConfig,
    manifest: Mapping[str, Any],
    weights: Mapping[str, HostArray],
    counts: CacheCounts,
    cache: CacheMemory | None,
) -> Executor:
    """Runs the artifact."""
    from graphllm.runtime.executor import Executor
    from graphllm.runtime.memory.memory import HostMemory

    artifact, threads = Path(config.load.artifact), config.load.threads
    return Executor(artifact, manifest, weights, counts.blocks, threads, cache, counts.snapshots, memory=HostMemory())
