"""What every rank of an engine loads: its share of the weights, and the executor that runs them. An engine on one
device is rank 0 of 1. Importing this imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from graphllm.config import ConfigError, CoreConfig, Peers
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.loading.memory import CacheCounts, cache_counts
from graphllm.program.artifact import Artifact
from graphllm.program.manifest import MemoryTable
from graphllm.weights.loading import baked
from graphllm.weights.plan.plan import WeightPlan

if TYPE_CHECKING:
    import torch

    from graphllm.engine.experts.lockstep import CoreWaves
    from graphllm.program.stages import Stage
    from graphllm.runtime.executor import Executor
    from graphllm.runtime.ranks.groups import Meeting
    from graphllm.runtime.ranks.rank_process import Settings
    from graphllm.weights.loading.early_reading import EarlyWeights
    from graphllm.weights.loading.readers import Loading

_SPIN = 200e-6  # seconds, on a GPU; a CPU's kernels need the core


def rank_device(kind: str, place: RankPlace) -> torch.device:
    """The device of a rank, which becomes the current one. Raises ConfigError where there are too few, and where this
    process has an engine of several ranks."""
    import torch

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
    """Threads of a rank's kernels on a CPU, which so many of its machine share."""
    import torch

    return max(1, (config.load.threads or torch.get_num_threads()) // here)


class RankPlace(NamedTuple):
    """A rank's place among all of an engine. degree: how many there are; here: on each node, of which this one is the
    rank ``local``. tensor: its number in the tensor-parallel group, of ``width``. stage: of the pipeline, None where
    there is one."""

    rank: int
    degree: int
    here: int
    tensor: int
    width: int
    stage: Stage | None

    @property
    def local(self) -> int:
        return self.rank % self.here

    @property
    def one_host(self) -> bool:
        """Whether the ranks of a stage are on one node."""
        return self.here % self.width == 0


def rank_place(config: CoreConfig, width: int, rank: int) -> RankPlace:
    """The place of one rank. The ranks of a stage are consecutive, and so are the ranks of a node. width: ranks of the
    tensor-parallel group."""
    stages = config.parallel.pipeline_parallel_size
    degree = width * stages
    here = config.parallel.ranks_of_node(degree)
    stage = None
    if stages > 1:
        from graphllm.program.stages import Stage  # imports torch

        stage = Stage(rank // width, stages)
    return RankPlace(rank, degree, here, rank % width, width, stage)


def stage_memory(artifact: Artifact, stage: Stage | None) -> MemoryTable:
    """The memory that a stage takes. Raises ConfigError for an artifact that cannot have so many stages."""
    if stage is None:
        return artifact.memory
    from graphllm.program.stages import message_bytes, own_states, own_tensors, stage_reads
    from graphllm.weights.loading.loader import chosen

    reads = stage_reads(artifact.program, stage)
    plan = chosen(WeightPlan.from_json(artifact.weights), reads)
    blocks = len(own_tensors(own_states(artifact.program, reads))) * artifact.program.blocks.bytes
    weights = sum(entry.nbytes for entry in plan if not entry.tie)
    messages = message_bytes(artifact, stage).memory
    return msgspec.structs.replace(artifact.memory, weights=weights, block=blocks, messages=messages)


def begin_weights(
    config: CoreConfig,
    artifact: Artifact,
    device: torch.device,
    place: RankPlace,
    early: EarlyWeights | None = None,
) -> Loading:
    """The parameters of a rank, from the artifact or the checkpoint, or random; they may still be being read (see
    `graphllm.weights.loading.loader.begin_weights`). early: where reading them has begun. Raises ConfigError."""
    if early is not None and (loading := early.loading()) is not None:
        return loading
    import torch

    from graphllm.program.stages import stage_reads
    from graphllm.weights.loading import loader
    from graphllm.weights.loading.random import random_weights
    from graphllm.weights.loading.readers import Loading

    rank = place.tensor if config.peers is None else config.peers.rank
    stored = StoredWeights(config, artifact)
    reads = None if place.stage is None else stage_reads(artifact.program, place.stage)
    plan, kernels = stored.plan, stored.kernels
    if stored.is_baked:
        if artifact.config.tensor_parallel_size != 1 or config.peers is not None:
            raise ConfigError("bake_weights: an artifact of several ranks has no weights of its own; compile without")
        if device.type == "cuda":
            return baked.begin_weights(artifact.folder, device)
        return Loading(baked.open_weights(artifact.folder))
    checkpoint, absent = stored.tensors
    if absent is not None:
        raise absent
    if checkpoint is not None:
        return loader.begin_weights(plan, checkpoint, device, kernels, rank, reads)
    weights = random_weights(loader.chosen(plan, reads), device, kernels=kernels)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Loading(weights)


def join_cores(peers: Peers, device: torch.device) -> CoreWaves:
    """Meet the engine cores that this one shares experts with; all of them do."""
    from graphllm.engine.experts.lockstep import CoreWaves
    from graphllm.runtime.ranks.groups import Meeting, joined_cores

    with contextlib.ExitStack() as undo:
        most = undo.enter_context(joined_cores(peers.rank, peers.count, Meeting(f"file://{peers.meeting}"), device))
        return CoreWaves(peers.rank, peers.count, most, peers.meeting, undo.pop_all())


class RankShare:
    """A rank other than 0, which `graphllm.runtime.ranks.rank_process` leads through its life. The artifact was
    verified by rank 0."""

    def __init__(self, settings: Settings) -> None:
        import torch

        config = msgspec.convert(settings.load, CoreConfig)
        self._artifact = artifact = Artifact.trusted(Path(config.load.artifact))
        self._place = rank_place(config, artifact.config.tensor_parallel_size, settings.rank)
        self._config, self._meeting = config, settings.meeting
        self._memory = stage_memory(artifact, self._place.stage)
        self.spin = _SPIN if artifact.device == "cuda" else 0.0
        self._device = rank_device(artifact.device, self._place)
        self._threads = rank_threads(self._config, self._place.here)
        torch.set_num_threads(1)  # of this thread; the kernels' is another one
        with begin_weights(config, artifact, self._device, self._place) as loading:
            self._weights = loading.finish()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Meet the other ranks."""
        from graphllm.runtime.ranks.groups import Meeting

        with join_group(self._place, Meeting(self._meeting), self._device):
            yield

    def count(self) -> CacheCounts:
        """Blocks and snapshots that there is memory for."""
        processes = self._place.here * self._config.parallel.data_parallel_size
        return cache_counts(self._artifact.config, self._memory, self._config.cache, processes)

    def executor(self, blocks: int, snapshots: int) -> Executor:
        """Runs the artifact."""
        from graphllm.runtime.executor import Executor

        place = self._place
        return Executor(
            self._artifact, self._weights, blocks, snapshots, self._threads, stage=place.stage, rank=place.tensor
        )


@contextlib.contextmanager
def join_group(place: RankPlace, meeting: Meeting, device: torch.device) -> Iterator[None]:
    """Be a rank of the groups. meeting: of this engine's ranks alone. Every rank has met all others when the context
    begins, so that what the library takes of a GPU's memory is taken."""
    import torch

    from graphllm.runtime.ranks.groups import joined

    stages = 1 if place.stage is None else place.stage.total
    with joined(place.rank, place.degree, meeting, device, stages, place.one_host):
        torch.distributed.all_reduce(torch.zeros(1, device=device))
        yield
