"""What the engine core has an executor do to the states on the device, in order with the steps: before and after a step
as the scheduler says, and to bring prefixes of the cache out and in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request import CacheEntry, EngineRequest
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.adapter_memory import AdapterMemory
from graphllm.program.schema import ExpertMoves

if TYPE_CHECKING:
    import torch


class DeviceStates(Protocol):
    """The part of an executor that moves states. All but the reads return at once; what they do is ordered with the
    steps. An executor is never asked for states that its layout does not have. adapters: the shape of one entry of each
    state of axis "adapter", by name."""

    @property
    def adapters(self) -> Mapping[str, tuple[int, ...]]: ...

    def write_entry(self, entry: int, values: Mapping[str, np.ndarray]) -> None:
        """Write the beginnings of a slot's states, by name."""

    def write_adapter(self, entry: int, tables: Mapping[str, torch.Tensor]) -> None:
        """Fill an entry of the adapters' tables; those that are not given become zero."""

    def move_experts(self, moves: ExpertMoves) -> None:
        """Move experts of a layer between ranks."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), in every state of axis "block"."""

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Zero the recurrent states of slots."""

    def load_snapshots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy snapshots to the recurrent states of slots (snapshot, slot)."""

    def save_snapshots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the recurrent states of slots to snapshots (slot, snapshot)."""

    def encode(self, data: np.ndarray, length: int, start: int) -> None:
        """Run the encoder graph on an item's data and write its ``length`` rows from ``start`` on."""

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """What blocks hold once all steps so far are done."""

    def write_blocks(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Fill blocks with what `read_blocks` gave."""

    def read_snapshots(self, snapshots: Sequence[int]) -> list[bytes]:
        """What snapshots hold once all steps so far are done."""

    def write_snapshots(self, snapshots: Sequence[int], data: Sequence[bytes]) -> None:
        """Fill snapshots with what `read_snapshots` gave."""


def before_step(states: DeviceStates, output: SchedulerOutput, adapters: AdapterMemory | None = None) -> None:
    """What a step builds on. adapters: has the tables of those that are to be written."""
    for entry, digest in output.adapters:
        assert adapters is not None
        states.write_adapter(entry, adapters[digest])
    if output.copies:
        states.copy_blocks(output.copies)
    if output.resets:
        states.reset_slots(output.resets)
    if output.snapshot_loads:
        states.load_snapshots(output.snapshot_loads)
    for item, start in output.encodes:
        states.encode(np.frombuffer(item.data, item.dtype).reshape(item.shape), item.length, start)


def after_step(states: DeviceStates, output: SchedulerOutput) -> None:
    """What is kept of a step that was started whole."""
    if output.snapshot_saves:
        states.save_snapshots(output.snapshot_saves)


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
    found = cache.export(request)
    blocks = [e.number for e in found if e.group >= 0]
    snapshots = [e.number for e in found if e.group < 0]
    data = states.read_blocks(blocks) if blocks else []
    if snapshots:
        data += states.read_snapshots(snapshots)
    return [CacheEntry(e.group, e.digest, d) for e, d in zip(found, data, strict=True)]


def import_prefix(states: DeviceStates, cache: CacheManager, entries: Sequence[CacheEntry]) -> int:
    """Take in what `export_prefix` gave; how many entries were new. Those for which no block is free are left out.
    Raises ConfigError for entries of another kind of cache."""
    wrong = [e.group for e in entries if not (-1 if cache.snapshots else 0) <= e.group < len(cache.groups)]
    if wrong:
        raise ConfigError(
            f"import_cache: there is no cache group {wrong[0]} here; import only what the same artifact exported"
        )
    taken = [(e, number) for e in entries if (number := cache.adopt(e.group, e.digest)) >= 0]
    blocks = [(number, e.data) for e, number in taken if e.group >= 0]
    snapshots = [(number, e.data) for e, number in taken if e.group < 0]
    if blocks:
        states.write_blocks(*zip(*blocks, strict=True))
    if snapshots:
        states.write_snapshots(*zip(*snapshots, strict=True))
    for entry, number in reversed(taken):
        cache.settle(entry.group, number)
    return len(taken)
