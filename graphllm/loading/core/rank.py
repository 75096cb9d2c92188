"""What every rank of an engine loads: its share of the weights, and the executor that runs them. An engine on one
device is rank 0 of 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from graphllm.config import ConfigError, CoreConfig, Peers
from graphllm.engine.experts.lockstep import CoreWaves
from graphllm.loading.core.place import RankPlace, rank_place, stage_memory
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.loading.memory import CacheCounts, cache_counts
from graphllm.program.artifact import Artifact
from graphllm.program.stages import stage_reads
from graphllm.runtime.executor import Executor
from graphllm.runtime.ranks.groups import Meeting, joined, joined_cores
from graphllm.runtime.ranks.rank_process import Settings
from graphllm.weights.loading import baked, loader
from graphllm.weights.loading.early_reading import EarlyWeights
from graphllm.weights.loading.random import random_weights
from graphllm.weights.loading.readers import Loading, begun_early

_SPIN = 200e-6  # seconds, on a GPU; a CPU's kernels need the core


def rank_device(kind: str, place: RankPlace) -> torch.device:
    """The device of a rank, which becomes the current one. Raises ConfigError where there are too few, and where this
    process has an engine of several ranks."""
    if place.degree > 1 and torch.distributed.is_initialized():
        raise ConfigError(
            f"tensor_parallel_size times pipeline_parallel_size is {place.degree}: this process has an engine of "
            "several ranks already; close it first, or open this one in another process. A group of "
            "torch.distributed that is your own counts, too"
        )
    if kind == "cpu":
        return torch.device("cpu")
    if place.degree == 1:
        return torch.device(kind)
    if (count := torch.cuda.device_count()) < place.here:
        of = "" if place.here == place.degree else f" on {place.degree // place.here} nodes"
        raise ConfigError(
            f"tensor_parallel_size times pipeline_parallel_size is {place.degree}{of}: this machine has {count} GPUs; "
            "give at most as many"
        )
    torch.cuda.set_device(place.local)
    return torch.device(kind, place.local)


def rank_threads(config: CoreConfig, here: int) -> int:
    """Threads of a rank's kernels on a CPU. here: ranks that share the machine."""
    return max(1, (config.load.threads or torch.get_num_threads()) // here)


def free_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes of a GPU that are free, and all of them; None for a CPU."""
    return torch.cuda.mem_get_info() if device.type == "cuda" else None


def begin_weights(
    stored: StoredWeights, device: torch.device, place: RankPlace, early: EarlyWeights | None = None
) -> Loading:
    """The parameters of a rank, from the artifact or the checkpoint, or random; they may still be being read (see
    `graphllm.weights.loading.loader.begin_weights`). early: where reading them has begun. Raises ConfigError."""
    if early is not None and (begun := early.begun()) is not None:
        return begun_early(early, *begun)
    artifact, peers = stored.artifact, stored.config.peers
    if stored.is_baked:
        if artifact.config.tensor_parallel_size != 1 or peers is not None:
            raise ConfigError("bake_weights: an artifact of several ranks has no weights of its own; compile without")
        if device.type == "cuda":
            return baked.begin_weights(artifact.folder, device)
        return Loading(baked.open_weights(artifact.folder))
    checkpoint, absent = stored.tensors
    if absent is not None:
        raise absent
    rank = place.tensor if peers is None else peers.rank
    reads = None if place.stage is None else stage_reads(artifact.program, place.stage)
    if checkpoint is not None:
        return loader.begin_weights(stored.plan, checkpoint, device, stored.artifact.kernels, rank, reads)
    weights = random_weights(stored.plan.chosen(reads), device, kernels=stored.artifact.kernels)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Loading(weights)


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
        with begin_weights(stored, self._device, self._place) as loading:
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
        return Executor(
            self._artifact, self._weights, blocks, snapshots, self._threads, stage=place.stage, rank=place.tensor
        )


@contextlib.contextmanager
def join_group(place: RankPlace, meeting: Meeting, device: torch.device) -> Iterator[None]:
    """Be a rank of the groups. Every rank has met all others when the context begins, so that the library has taken its
    part of a GPU's memory. meeting: of this engine's ranks, and of nobody else."""
    stages = 1 if place.stage is None else place.stage.total
    with joined(place.rank, place.degree, meeting, device, stages, place.one_host):
        torch.distributed.all_reduce(torch.zeros(1, device=device))
        yield
