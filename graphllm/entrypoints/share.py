"""What every rank of an engine loads: its share of the weights, and the executor that runs them. An engine on one
device is rank 0 of 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphllm.config import ConfigError, CoreConfig
from graphllm.entrypoints.memory import CacheCounts, cache_counts
from graphllm.entrypoints.source import open_tensors
from graphllm.weights import baked

if TYPE_CHECKING:
    import torch

    from graphllm.runtime.executor import Executor
    from graphllm.runtime.rank_process import Settings

_SPIN = 200e-6  # seconds, on a GPU; a CPU's kernels need the core


def rank_device(kind: str, rank: int, degree: int) -> torch.device:
    """The device of a rank, which becomes the current one. Raises ConfigError where there are too few."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    if degree == 1:
        return torch.device(kind)
    if (count := torch.cuda.device_count()) < degree:
        raise ConfigError(f"tensor_parallel_size is {degree}: this machine has {count} GPUs; give at most as many")
    torch.cuda.set_device(rank)
    return torch.device(kind, rank)


def rank_threads(config: CoreConfig, degree: int) -> int:
    """Threads of a rank's kernels on a CPU: ranks share the machine."""
    import torch

    return max(1, (config.load.threads or torch.get_num_threads()) // degree)


def open_weights(
    config: CoreConfig, compiled: Mapping[str, Any], device: torch.device, rank: int
) -> dict[str, torch.Tensor]:
    """The finished parameters of a rank, from the artifact or the checkpoint, or random. compiled: of the artifact's
    key. Raises ConfigError."""
    import torch

    from graphllm.weights.formats.integers import KERNELS
    from graphllm.weights.loader import load_weights
    from graphllm.weights.plan import WeightPlan
    from graphllm.weights.random import random_weights

    place = Path(config.load.artifact)
    checkpoint, absent = open_tensors(Path(config.model.model), config.load.load_format, config.model.speculative_model)
    plan = WeightPlan.from_json((place / "weights.json").read_text())
    if baked.is_baked(place):
        if compiled["tensor_parallel_size"] != 1:
            raise ConfigError("bake_weights: an artifact of several ranks has no weights of its own; compile without")
        weights = baked.open_weights(place, device)
    elif absent is not None:
        raise absent
    elif checkpoint is not None:
        weights = load_weights(plan, checkpoint, device, kernels=place / KERNELS, rank=rank)
    else:
        weights = random_weights(plan, device, kernels=place / KERNELS)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return weights


class RankShare:
    """A rank other than 0, which `graphllm.runtime.rank_process` leads through its life. The artifact was verified by
    rank 0."""

    def __init__(self, settings: Settings) -> None:
        import msgspec
        import torch

        from graphllm import artifact

        self._settings = settings
        self._config = msgspec.convert(settings.load, CoreConfig)
        self._place = Path(self._config.load.artifact)
        self._manifest = artifact.read_manifest(self._place)
        compiled = self._manifest["factors"]["compile"]
        kind = compiled["target"]["device"]
        self.spin = _SPIN if kind == "cuda" else 0.0
        self._device = rank_device(kind, settings.rank, settings.degree)
        self._threads = rank_threads(self._config, settings.degree)
        torch.set_num_threads(1)  # of this thread; the kernels' is another one
        self._weights = open_weights(self._config, compiled, self._device, settings.rank)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Meet the other ranks."""
        with join_group(self._settings.rank, self._settings.degree, Path(self._settings.folder), self._device):
            yield

    def count(self) -> CacheCounts:
        """Blocks and snapshots that there is memory for."""
        processes = self._settings.degree * self._config.parallel.data_parallel_size
        return cache_counts(self._manifest, self._config.cache, processes)

    def executor(self, blocks: int, snapshots: int) -> Executor:
        """Runs the artifact."""
        from graphllm.runtime.executor import Executor

        return Executor(self._place, self._manifest, self._weights, blocks, self._threads, num_snapshots=snapshots)


@contextlib.contextmanager
def join_group(rank: int, degree: int, folder: Path, device: torch.device) -> Iterator[None]:
    """Be a rank of the group. folder: of this engine's ranks alone. Every rank has met all others when the context
    begins, so that what the library takes of a GPU's memory is taken."""
    import torch

    from graphllm.runtime.groups import joined

    with joined(rank, degree, folder / "meeting", device):
        torch.distributed.all_reduce(torch.zeros(1, device=device))
        yield
