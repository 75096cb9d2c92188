"""Meeting the ranks of an engine: they agree on the cache's size, and make their executors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

import torch

from graphllm.loading.core.core_start import CoreStart
from graphllm.loading.core.rank import join_group
from graphllm.loading.core.rank_device import free_memory
from graphllm.loading.core.ranks import StartedRanks
from graphllm.loading.memory import cache_counts
from graphllm.runtime.memory.memory import Memory
from graphllm.runtime.ranks.groups import Meeting
from graphllm.runtime.ranks.multiproc_executor import MultiprocExecutor
from graphllm.runtime.ranks.rank_messages import Allocate, Counted, Loaded, Serving

_log = logging.getLogger(__name__)


def join_ranks(
    ranks: StartedRanks,
    start: CoreStart,
    device: torch.device,
    weights: Mapping[str, torch.Tensor],
    threads: int,
    memory: Memory | None = None,
) -> MultiprocExecutor:
    """Meet the ranks, now that this one has its weights, and make the executor of all. memory: of this rank; None for
    torch's. Raises ConfigError, RankError for a rank that cannot go on."""
    config, others = ranks.config, ranks.all
    loaded = others.answers(Loaded)
    start.clock("wait for the ranks")
    place, joined = start.place, contextlib.ExitStack()
    try:
        joined.enter_context(join_group(place, Meeting(ranks.meeting_url, ranks.listener), device))
        processes = place.here * config.parallel.data_parallel_size
        gpu = free_memory(device)
        blocks, snapshots = cache_counts(start.compiled, start.memory, config.cache, processes, gpu)
        for counted in others.answers(Counted):
            blocks, snapshots = min(blocks, counted.blocks), min(snapshots, counted.snapshots)
        start.clock("join the ranks")
        others.send(Allocate(blocks, snapshots))
        executor = MultiprocExecutor(
            ranks.all, joined, start.artifact, weights, blocks, snapshots, threads, place.stage, memory
        )
        executor.others_serve(loaded, others.answers(Serving))
    except BaseException:
        joined.close()
        raise
    for rank, seconds in enumerate(executor.rank_seconds, 1):
        phases = ", ".join(f"{name} {s:.2f}" for name, s in seconds.items())
        _log.info("rank %d of %d is ready; seconds: %s", rank, others.degree, phases)
    return executor
