"""Starting the ranks of an engine: this process is rank 0, the others have processes of their own. All load their
shares at the same time, then meet, agree on the cache's size, and make their executors."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from graphllm.config import CoreConfig
from graphllm.entrypoints.memory import cache_counts
from graphllm.entrypoints.rank_process import COMMAND
from graphllm.entrypoints.share import RankPlace, join_group
from graphllm.runtime.rank_messages import Allocate, Counted, Loaded, Serving
from graphllm.runtime.rank_processes import RankProcesses, WaitingRanks

if TYPE_CHECKING:
    import torch

    from graphllm.runtime.multiproc_executor import MultiprocExecutor

_log = logging.getLogger(__name__)


class StartedRanks:
    """Processes that load, and the folder where they meet this one."""

    def __init__(self, waiting: WaitingRanks, config: CoreConfig, exits: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="graphllm-ranks-"))
        self.processes = RankProcesses(waiting, str(self.folder), msgspec.to_builtins(config), exits)

    def forget_folder(self) -> None:
        """Nobody joins any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """End the processes."""
        self.processes.close()
        self.forget_folder()


def start_ranks(
    config: CoreConfig, degree: int, undo: contextlib.ExitStack, exits: bool, waiting: WaitingRanks | None
) -> StartedRanks | None:
    """Have the processes of all ranks but 0 load; None where there are none. undo: ends them. exits: see
    `RankProcesses`. waiting: those that were started before the degree was known, and are used where it is theirs."""
    if waiting is not None and waiting.degree != degree:
        waiting.close()
        waiting = None
    if degree == 1:
        return None
    ranks = StartedRanks(waiting or WaitingRanks(COMMAND, degree), config, exits)
    undo.callback(ranks.close)
    return ranks


def join_ranks(
    ranks: StartedRanks,
    config: CoreConfig,
    manifest: Mapping[str, Any],
    place: RankPlace,
    device: torch.device,
    weights: Mapping[str, torch.Tensor],
    threads: int,
    clock: Callable[[str], None],
) -> MultiprocExecutor:
    """Meet the ranks, now that this one has its weights, and make the executor of all. Raises ConfigError, RankError
    for a rank that cannot go on."""
    from graphllm.runtime.multiproc_executor import MultiprocExecutor

    processes = ranks.processes
    loaded = processes.answers(Loaded)
    clock("wait for the ranks")
    joined = contextlib.ExitStack()
    try:
        joined.enter_context(join_group(place, ranks.folder, device))
        blocks, snapshots = cache_counts(manifest, config.cache, processes.degree * config.parallel.data_parallel_size)
        for counted in processes.answers(Counted):
            blocks, snapshots = min(blocks, counted.blocks), min(snapshots, counted.snapshots)
        clock("join the ranks")
        processes.send(Allocate(blocks, snapshots))
        artifact = Path(config.load.artifact)
        executor = MultiprocExecutor(
            processes, joined, artifact, manifest, weights, blocks, threads, None, snapshots, place.stage
        )
        executor.others_serve(loaded, processes.answers(Serving))
    except BaseException:
        joined.close()
        raise
    for rank, seconds in enumerate(executor.rank_seconds, 1):
        told = ", ".join(f"{name} {s:.2f}" for name, s in seconds.items())
        _log.info("rank %d of %d is ready; seconds: %s", rank, processes.degree, told)
    joined.callback(ranks.forget_folder)
    return executor
