"""What the engine core has an executor do to the states on the device, in order with the steps: before and after a step
as the scheduler says, and to bring prefixes of the cache out and in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.cache_manager import CacheManager
from graphllm.engine.request import CacheEntry, EngineRequest
from graphllm.engine.scheduler_output import SchedulerOutput


class DeviceStates(Protocol):
    """The part of an executor that moves states. All but the reads return at once; what they do is ordered with the
    steps. An executor is never asked for states that its layout does not have. adapters: the shape of one entry of each
    state of axis "adapter", by name."""

    @property
    def adapters(self) -> Mapping[str, tuple[int, ...]]: ...

    def write_entry(self, entry: int, values: Mapping[str, np.ndarray]) -> None:
        """Write the beginnings of a slot's or an adapter's states, by name."""

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


def before_step(states: DeviceStates, output: SchedulerOutput) -> None:
    """What a step builds on."""
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


def write_adapter(states: DeviceStates, adapter_id: int, count: int, values: Mapping[str, np.ndarray]) -> None:
    """Fill an entry of the adapters' tables, of which there are ``count`` beside the neutral one: each table is zero
    but for what ``values`` has of it, the beginning of its entry. Raises ConfigError, and nothing is done, for what no
    table can hold."""
    if not 1 <= adapter_id <= count:
        raise ConfigError(f"adapter_id is {adapter_id}: this artifact has room for {count} adapters, numbered from 1")
    entries = {name: np.zeros(shape, dtype=np.float32) for name, shape in states.adapters.items()}
    for name, given in values.items():
        if name not in entries:
            raise ConfigError(
                f"adapter {adapter_id} has a table {name!r}; the model's are {', '.join(sorted(entries))}"
            )
        room = entries[name].shape
        if len(given.shape) != len(room) or any(n > most for n, most in zip(given.shape, room, strict=True)):
            raise ConfigError(f"adapter {adapter_id}: table {name!r} has shape {given.shape}; there is room for {room}")
        entries[name][tuple(map(slice, given.shape))] = given
    states.write_entry(adapter_id, entries)


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
