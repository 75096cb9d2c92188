"""The device of a rank, and its share of the weights there. An engine on one device is rank 0 of 1."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

import torch

from graphllm.config import ConfigError, CoreConfig
from graphllm.loading.core.loaders.offloading import begin_offloaded
from graphllm.loading.core.place import RankPlace
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program.stages import stage_reads
from graphllm.weights.loading import baked, loader
from graphllm.weights.loading.early_reading import EarlyWeights
from graphllm.weights.loading.random import random_weights
from graphllm.weights.loading.readers import Loading, begun_early


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
    stored: StoredWeights,
    device: torch.device,
    place: RankPlace,
    early: EarlyWeights | None = None,
    into: Mapping[str, torch.Tensor] | None = None,
) -> Loading:
    """The parameters of a rank, from the artifact or the checkpoint, or random; they may still be being read (see
    `graphllm.weights.loading.loader.begin_weights`). early: where reading them has begun. into: memory to fill, zeros;
    None: it is allocated. Raises ConfigError."""
    if early is not None and into is None and (begun := early.begun()) is not None:
        return begun_early(early, *begun)
    reads = None if place.stage is None else stage_reads(stored.artifact.program, place.stage)
    if stored.config.load.cpu_offload_gb:
        return begin_offloaded(stored, device, reads, functools.partial(_begin, stored, device, place))
    return _begin(stored, device, place, reads, into)


def _begin(
    stored: StoredWeights,
    device: torch.device,
    place: RankPlace,
    names: Collection[str] | None,
    into: Mapping[str, torch.Tensor] | None,
) -> Loading:
    """As `begin_weights`. names: of the parameters; None for all."""
    artifact, peers = stored.artifact, stored.config.peers
    if stored.is_baked:
        if artifact.config.tensor_parallel_size != 1 or peers is not None:
            raise ConfigError("bake_weights: an artifact of several ranks has no weights of its own; compile without")
        if device.type == "cuda":
            return baked.begin_weights(artifact.folder, device, into)
        return Loading(baked.open_weights(artifact.folder))
    checkpoint, absent = stored.tensors
    if absent is not None:
        raise absent
    rank = place.tensor if peers is None else peers.rank
    if checkpoint is not None:
        return loader.begin_weights(stored.plan, checkpoint, device, stored.artifact.libraries, rank, names, into=into)
    libraries = stored.artifact.libraries
    weights = random_weights(stored.plan.chosen(names), device, libraries=libraries, rank=rank, into=into)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Loading(weights)
