"""How much memory a core's cache gets, from the manifest's memory table and what the machine has."""

from __future__ import annotations

from typing import NamedTuple

from graphllm.config import CacheConfig, CompileConfig, ConfigError, EngineArgs
from graphllm.config.setting import size_text
from graphllm.host.machine import available_memory, gpu_memory
from graphllm.program.manifest import MemoryTable
from graphllm.program.program import BlockPool
from graphllm.runtime.memory.cpu_cache_memory import CacheMemory

# Bytes of a GPU for kernels, libraries, graphs and what allocations are rounded up to: 0.22 to 0.34 GB measured, see
# bench/results/h200/gpu_proofs.json.
_OTHER = 300 * 10**6


def gpu_bytes(memory: MemoryTable, blocks: int) -> int:
    """Bytes that a GPU's memory holds in all: by the manifest's memory table exact, and an estimate of what CUDA
    takes."""
    return _fixed_bytes(memory) + 4 * memory.zeroed + blocks * memory.block + _OTHER


def _fixed_bytes(memory: MemoryTable) -> int:
    """Bytes that a process holds, its cache not counted. messages: what a stage of a pipeline exchanges."""
    return memory.weights + memory.arena + memory.state + memory.messages


def check_cache_memory(cache: CacheConfig | EngineArgs, device: str) -> None:
    """Raise ConfigError when a cache is asked for that the machine has no memory for."""
    most = gpu_memory() if device == "cuda" else available_memory()
    for name in ("kv_cache_memory_bytes", "snapshot_memory_bytes"):
        if (getattr(cache, name) or 0) > most:
            raise ConfigError(
                f"{name} is {getattr(cache, name)}: the {device} has {most / 1e9:.1f} GB of memory left; give less, or "
                "leave it out"
            )


class CacheCounts(NamedTuple):
    """blocks: of the paged cache, with the null block, which is no request's. snapshots: of recurrent states."""

    blocks: int
    snapshots: int


def cpu_cache_memory(pool: BlockPool, counts: CacheCounts) -> CacheMemory | None:
    """A CPU's paged cache; a thread asks for its memory while torch is imported. None for a model without one."""
    return CacheMemory(pool.tensors, counts.blocks, pool.bytes) if pool.tensors else None


def cache_counts(
    config: CompileConfig,
    memory: MemoryTable,
    cache: CacheConfig,
    processes: int = 1,
    gpu: tuple[int, int] | None = None,
) -> CacheCounts:
    """What memory allows.

    config: of the artifact.
    memory: what a process of it takes.
    processes: ranks and engine cores that each need as much of a CPU's memory.
    gpu: bytes of the GPU that are free now that the weights are there, and all of them; None on a CPU.

    Raises ConfigError where the memory is not enough.
    """
    size, most, device = cache.kv_cache_memory_bytes, None, config.target.device
    if device == "cpu":
        needed = _fixed_bytes(memory) + (size or 0)
        left = available_memory()
        needed *= processes
        if needed > left:
            raise ConfigError(
                f"memory: weights, arena{_states(config, memory)} and cache take {needed / 1e9:.1f} GB, there are "
                f"{left / 1e9:.1f} GB left; free some, lower --kv-cache-memory-bytes{_fewer(memory)} or "
                "--max-num-batched-tokens, or take a smaller model"
            )
    if size is None and device == "cuda":
        assert gpu is not None
        free, total = gpu
        size = int(free - (1 - cache.gpu_memory_utilization) * total) - (gpu_bytes(memory, 0) - memory.weights)
        if size < 0:
            raise ConfigError(
                f"memory: weights, arena{_states(config, memory)} take {size_text(-size)} more than the share of the "
                f"GPU that --gpu-memory-utilization {cache.gpu_memory_utilization:g} leaves; raise it, lower "
                f"--max-num-batched-tokens{_fewer(memory)}, keep weights on the host with --cpu-offload-gb, or take a "
                "smaller model"
            )
    elif size is None:
        size = max(0, available_memory() - processes * memory.weights) // (4 * processes)
        # A full batch of the longest sequences, and room for the prefix cache.
        most = 4 * memory.blocks_of_sequence * config.max_num_seqs + 1
    snapshots = 0
    if memory.snapshot:
        given = cache.snapshot_memory_bytes
        usual = min(config.usual_snapshots, size // 8 // memory.snapshot)
        snapshots = usual if given is None else given // memory.snapshot
        if cache.kv_cache_memory_bytes is None:
            size -= snapshots * memory.snapshot
    if not memory.block:
        return CacheCounts(2, snapshots)
    blocks = size // memory.block
    if blocks < 2:
        taken = f", or lower --snapshot-memory-bytes, {size_text(snapshots * memory.snapshot)}" if snapshots else ""
        rest = f"{size_text(size)} left" if size > 0 else "nothing left"
        raise ConfigError(
            f"kv cache: {rest} for it, it needs {size_text(2 * memory.block)} at least; "
            f"raise --kv-cache-memory-bytes or --gpu-memory-utilization{taken}"
        )
    return CacheCounts(int(blocks if most is None else min(blocks, most)), int(snapshots))


def _states(config: CompileConfig, memory: MemoryTable) -> str:
    """What the states of sequences take, for messages; nothing where it is little."""
    states = memory.state_of_sequence * (config.max_num_seqs + 1)
    return f", states of {config.max_num_seqs} sequences ({size_text(states)})" if _counts(memory) else ""


def _fewer(memory: MemoryTable) -> str:
    return f", --max-num-seqs (each takes {size_text(memory.state_of_sequence)})" if _counts(memory) else ""


def _counts(memory: MemoryTable) -> bool:
    return memory.state_of_sequence >= _WORTH_SAYING


_WORTH_SAYING = 1 << 20  # bytes of a sequence's states: tables of settings are smaller, recurrent states are not
