"""What lets a rank sleep, where enable_sleep_mode is set: its memory, and how its weights are read again.

Imports torch late: an engine on a CPU may have no need of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from graphllm.config import CoreConfig
from graphllm.host.cuda_driver import CudaDriver
from graphllm.loading.core.place import RankPlace
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program.baked_table import check
from graphllm.program.stages import stage_reads
from graphllm.runtime.executor import Executor
from graphllm.runtime.sleeping.cpu_memory import CpuSleepMemory
from graphllm.runtime.sleeping.rank_sleep import KEY, RankSleep, SleepMemory

if TYPE_CHECKING:
    import torch

    from graphllm.runtime.sleeping.cuda_memory import CudaSleepMemory

_MOVED = "enable_eplb has moved experts since the weights were read"


def sleep_memory(config: CoreConfig, device: torch.device, place: RankPlace) -> CudaSleepMemory | None:
    """The memory of a GPU that sleeps; None where it does not, and on a CPU, whose memory is as any other."""
    if not config.sleep.enable_sleep_mode or device.type != "cuda":
        return None
    from graphllm.runtime.sleeping.cuda_memory import CudaSleepMemory

    # Libraries keep hold of what they have once sent to other ranks.
    return CudaSleepMemory(device, CudaDriver(), shares=place.degree > 1 or config.peers is not None)


def parameters(
    memory: CudaSleepMemory | None, stored: StoredWeights, place: RankPlace
) -> Mapping[str, torch.Tensor] | None:
    """Memory for the parameters of a rank; None where they are as any others."""
    if memory is None:
        return None
    wanted, same = dict[str, tuple[Sequence[int], str]](), dict[str, str]()
    if stored.is_baked:
        first: dict[int, str] = {}
        for name, stands in check(stored.artifact.folder)["tensors"].items():
            same[name] = first.setdefault(stands["offset"], name)
            wanted[same[name]] = tuple(stands["shape"]), stands["dtype"]
    else:
        reads = None if place.stage is None else stage_reads(stored.artifact.program, place.stage)
        for entry in stored.plan.chosen(reads):
            same[entry.name] = entry.tie or entry.name
            if not entry.tie:
                wanted[entry.name] = entry.shape, entry.dtype
    made = memory.parameters(wanted)
    return {name: made[own] for name, own in same.items()}


def let_sleep(
    config: CoreConfig,
    executor: Executor,
    reload: Callable[[], object],
    is_file: bool,
    memory: CudaSleepMemory | None = None,
) -> None:
    """Let an executor's rank sleep, where the settings say so.

    reload: reads the parameters again, into the memory where they were.
    is_file: the parameters are a mapped file.
    memory: of a GPU.
    """
    if not config.sleep.enable_sleep_mode:
        return
    found: SleepMemory
    if memory is None:
        weights = executor.worker.parameters.values()
        found = CpuSleepMemory(weights, executor.states, lambda: executor.programs.arena, is_file)
    else:
        found = memory
        memory.keep(executor.states.tensors[f"state.{name}"] for name in executor.adapters)
    moved = _MOVED if executor.expert_slots is not None else ""
    executor.worker.kept[KEY] = RankSleep(found, reload, moved)
