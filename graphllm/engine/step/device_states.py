"""What the engine core has an executor do to the states on the device, in order with the steps: before and after a step
as the scheduler says, and to bring prefixes of the cache out and in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.cache.cache_exchange import CacheExchange
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request import CacheEntry, EngineRequest
from graphllm.runtime.commands.command import Answered, Command, Query, joined
from graphllm.runtime.commands.states import (
    ReadBlocks,
    ReadSnapshots,
    WriteBlocks,
    WriteSnapshots,
)

if TYPE_CHECKING:
    import torch


class DeviceStates(Protocol):
    """The part of an executor that moves states. It is never asked for states that its layout does not have.

    adapters: the shape of one entry of each state of axis "adapter", by name.
    block_bytes, snapshot_bytes: of one block and of one snapshot, by rank.
    """

    @property
    def adapters(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def block_bytes(self) -> list[int]: ...
    @property
    def snapshot_bytes(self) -> list[int]: ...

    def do(self, command: Command) -> None:
        """Have every rank run a command, in order with the steps; returns at once."""

    def ask(self, query: Query, timeout: float | None = None) -> list[Answered]:
        """The answers of all ranks, once all steps before have ended."""


def adapter_tables(states: DeviceStates, name: str, values: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Whole tables of an adapter: each is zero but for what ``values`` has of it, its beginning. Raises ConfigError for
    what no table can hold."""
    import torch

    tables = {}
    for table, given in values.items():
        if table not in states.adapters:
            raise ConfigError(
                f"adapter {name} has a table {table!r}; the model's are {', '.join(sorted(states.adapters))}"
            )
        room = states.adapters[table]
        if len(given.shape) != len(room) or any(n > most for n, most in zip(given.shape, room, strict=True)):
            raise ConfigError(f"adapter {name}: table {table!r} has shape {given.shape}; there is room for {room}")
        tables[table] = torch.zeros(room)
        tables[table][tuple(map(slice, given.shape))] = torch.from_numpy(np.ascontiguousarray(given)).float()
    return tables


def export_prefix(states: DeviceStates, cache: CacheManager, request: EngineRequest) -> list[CacheEntry]:
    """What the cache has of a request's prompt, which another core with the same secret and artifact may import."""
    found = CacheExchange(cache).export(request)
    blocks = [e.number for e in found if e.group >= 0]
    snapshots = [e.number for e in found if e.group < 0]
    data = joined(states.ask(ReadBlocks(blocks))) if blocks else []
    if snapshots:
        data += joined(states.ask(ReadSnapshots(snapshots)))
    return [CacheEntry(e.group, e.digest, d) for e, d in zip(found, data, strict=True)]


def import_prefix(states: DeviceStates, cache: CacheManager, entries: Sequence[CacheEntry]) -> int:
    """Take in what `export_prefix` gave; how many entries were new. Those for which no block is free are left out.
    Raises ConfigError for entries of another kind of cache."""
    wrong = [e.group for e in entries if not -len(cache.states.pools) <= e.group < len(cache.groups)]
    if wrong:
        raise ConfigError(
            f"import_cache: there is no cache group {wrong[0]} here; import only what the same artifact exported"
        )
    exchange = CacheExchange(cache)
    taken = [(e, number) for e in entries if (number := exchange.adopt(e.group, e.digest)) >= 0]
    blocks = {number: e.data for e, number in taken if e.group >= 0}
    snapshots = {number: e.data for e, number in taken if e.group < 0}
    if blocks:
        states.do(WriteBlocks(list(blocks), list(blocks.values()), states.block_bytes))
    if snapshots:
        states.do(WriteSnapshots(list(snapshots), list(snapshots.values()), states.snapshot_bytes))
    for entry, number in reversed(taken):
        exchange.settle(entry.group, number)
    return len(taken)
