"""A rank of several: its share of the weights, the groups that it joins, and the executor that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from graphllm.config import CoreConfig, Peers
from graphllm.engine.experts.lockstep import CoreWaves
from graphllm.loading.core.loaders.sleeping import let_sleep, parameters, sleep_memory
from graphllm.loading.core.place import RankPlace, rank_place, stage_memory
from graphllm.loading.core.rank_device import begin_weights, free_memory, rank_device, rank_threads
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.loading.memory import CacheCounts, cache_counts
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.runtime.ranks.groups import Meeting, joined, joined_cores
from graphllm.runtime.ranks.rank_process import Settings

_SPIN = 200e-6  # seconds, on a GPU; a CPU's kernels need the core


def join_cores(peers: Peers, device: torch.device) -> CoreWaves:
    """Meet the engine cores that this one shares experts with; all of them do."""
    with contextlib.ExitStack() as undo:
        most = undo.enter_context(joined_cores(peers.rank, peers.count, Meeting(f"file://{peers.meeting}"), device))
        return CoreWaves(peers.rank, peers.count, most, peers.meeting, undo.pop_all())


class RankShare:
    """A rank other than 0, which `graphllm.runtime.ranks.rank_process` leads through its life. The artifact was
    verified by rank 0."""

    def __init__(self, settings: Settings) -> None:
        config = msgspec.convert(settings.load, CoreConfig)
        self._artifact = artifact = Artifact.trusted(Path(config.load.artifact))
        self._place = rank_place(config, artifact.config.tensor_parallel_size, settings.rank)
        self._config, self._meeting = config, settings.meeting
        stored = StoredWeights(config, artifact)
        self._memory = stage_memory(stored, self._place.stage)
        self.spin = _SPIN if artifact.device == "cuda" else 0.0
        self._device = rank_device(artifact.device, self._place)
        self._threads = rank_threads(config, self._place.here)
        torch.set_num_threads(1)  # of this thread; the kernels' is another one
        self._stored = stored
        self._sleeping = sleep_memory(config, self._device, self._place)
        with begin_weights(
            stored, self._device, self._place, into=parameters(self._sleeping, stored, self._place)
        ) as loading:
            self._weights = loading.finish()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Meet the other ranks."""
        with join_group(self._place, Meeting(self._meeting), self._device):
            yield

    def count(self) -> CacheCounts:
        """Blocks and snapshots that there is memory for."""
        processes = self._place.here * self._config.parallel.data_parallel_size
        gpu = free_memory(self._device)
        return cache_counts(self._artifact.config, self._memory, self._config.cache, processes, gpu)

    def executor(self, blocks: int, snapshots: int) -> Executor:
        """Runs the artifact."""
        place = self._place
        executor = Executor(
            self._artifact, self._weights, blocks, snapshots, self._threads, stage=place.stage, rank=place.tensor,
            memory=self._sleeping,
        )  # fmt: skip

        def reload() -> None:
            with begin_weights(self._stored, self._device, place, into=self._weights) as loading:
                loading.finish()

        is_file = self._stored.is_baked and self._device.type == "cpu"
        let_sleep(self._config, executor, reload, is_file, self._sleeping)
        return executor


@contextlib.contextmanager
def join_group(place: RankPlace, meeting: Meeting, device: torch.device) -> Iterator[None]:
    """Be a rank of the groups. Every rank has met all others when the context begins, so that the library has taken its
    part of a GPU's memory. meeting: of this engine's ranks, and of nobody else."""
    stages = 1 if place.stage is None else place.stage.total
    with joined(place.rank, place.degree, meeting, device, stages, place.one_host):
        torch.distributed.all_reduce(torch.zeros(1, device=device))
        yield
