"""How much host memory the cache's copies may take where the user has not said."""

from __future__ import annotations

from typing import Any, Protocol

from graphllm.config.engine import LEAST_TIER_BYTES
from graphllm.host.machine import available_memory
from graphllm.program.schema import CacheLayout

_SHARE = 4  # a quarter of what the host has left
_TIMES = 4  # the device's cache: more is rarely found again


class Cache(Protocol):
    """The part of an executor with a cache. Bytes are those of each rank."""

    device: Any
    shareable: bool
    layout: CacheLayout
    block_bytes: list[int]
    snapshot_bytes: list[int]


def usual_size(executor: Cache, caching: bool, cores: int) -> int:
    """Bytes for one of so many engine cores of this host; 0 on a CPU, whose cache lies there already, and where
    beginnings are not shared. Nothing of it is taken before the device's cache is full."""
    layout = executor.layout
    if executor.device.type != "cuda" or not (caching and executor.shareable) or layout.stateless:
        return 0
    if layout.recurrent and not layout.num_snapshots:
        return 0
    device = layout.num_blocks * sum(executor.block_bytes) + layout.num_snapshots * sum(executor.snapshot_bytes)
    size = min(available_memory() // _SHARE // cores, _TIMES * device)
    least = max(LEAST_TIER_BYTES, sum(executor.block_bytes) + sum(executor.snapshot_bytes))
    return size if size >= least else 0
