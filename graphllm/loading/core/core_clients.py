"""The processes of a model's engine cores: how many, and which CPUs and GPUs each of them has."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from graphllm.config import CoreConfig, Peers
from graphllm.engine.process.core_client import CoreClient
from graphllm.engine.process.core_group import CoreGroup
from graphllm.engine.process.placement import cpus_of, gpus_of
from graphllm.engine.process.spawn import Child
from graphllm.program.artifact import Artifact


def core_client(
    config: CoreConfig, unresponsive: float = 10.0, stuck: float = 60.0, children: Sequence[Child] = ()
) -> CoreClient | CoreGroup:
    """The engine of a model, not started: one core, or a group of them. children: processes that `spawn_cores` has
    started. The others: as for `CoreClient`."""
    count = config.parallel.cores
    if count == 1:
        child = children[0] if children else None
        return CoreClient(config, unresponsive=unresponsive, stuck=stuck, child=child)
    compiled = Artifact.trusted(Path(config.load.artifact)).config
    on_cpu = compiled.target.device == "cpu"
    gpus = compiled.tensor_parallel_size * config.parallel.pipeline_parallel_size
    waiting = dict(enumerate(children))  # one process loads one engine
    sharing = compiled.data_parallel_experts == count
    meetings = tempfile.TemporaryDirectory(prefix="graphllm-cores-") if sharing else None
    started = [0] * count

    def make(rank: int) -> CoreClient:
        peers = None
        if meetings is not None:  # a core that dies takes the others along: the next ones meet elsewhere
            peers = Peers(rank, count, f"{meetings.name}/{started[rank]}")
            started[rank] += 1
        return CoreClient(
            replace(config, peers=peers, parallel=replace(config.parallel, data_parallel_rank=rank)),
            unresponsive=unresponsive,
            stuck=stuck,
            child=waiting.pop(rank, None),
            cpus=cpus_of(rank, count) if on_cpu else (),
            gpus=gpus_of(rank, gpus),
        )

    return CoreGroup(make, count, config.scheduler.enable_prefix_caching)
