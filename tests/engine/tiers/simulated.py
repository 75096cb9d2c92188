"""A simulated rank under the part of the cache's tiers. What it may do late, it does late: a copy that no command waits
for reads its places only when it ends."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from graphllm.config import SchedulerConfig, TierConfig
from graphllm.engine.parts.part import CoreSetup, PartContext
from graphllm.engine.parts.tiers import Tiers
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.schedule.scheduler_output import SchedulerLimits
from graphllm.engine.tiers.further_tier import FurtherTier
from graphllm.program.schema import CacheLayout
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.tiers import (
    AwaitStores,
    LoadEntries,
    OpenTiers,
    PrepareEntries,
    ReadyEntries,
    StoreEntries,
)


class _Copy(NamedTuple):
    command: StoreEntries | LoadEntries
    stores: bool


class SimulatedRank:
    """cache: contents by block and offset. snapshots: by number. block_size: of the largest group."""

    def __init__(self, cache: dict[tuple[int, int], Any], snapshots: dict[int, Any], block_size: int) -> None:
        self._cache, self._snapshots, self._offsets = cache, snapshots, range(block_size)
        self.host: dict[str, dict[int, Any]] = {}
        self._prepared: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        self._copies = deque[_Copy]()  # in the order in which they were asked for
        self._ended: list[tuple[int, float]] = []
        self._random = random.Random(0)

    def advance(self) -> None:
        """Some time passes."""
        for _ in range(self._random.randrange(3)):
            if self._copies:
                self._run_next()

    def do(self, command: Command) -> None:
        match command:
            case OpenTiers(entries):
                self.host = {kind: {} for kind in entries}
                self._prepared, self._ready = dict.fromkeys(entries, 0), dict.fromkeys(entries, 0)
            case PrepareEntries(entries):
                assert all(count > self._prepared[kind] for kind, count in entries.items())
                self._prepared |= entries
            case StoreEntries():
                self._copies.append(_Copy(command, stores=True))
                if command.blocking:
                    self._run_stores(command.ticket)
            case LoadEntries():
                self._copies.append(_Copy(command, stores=False))
            case AwaitStores(ticket):
                self._run_stores(ticket)
            case _:
                raise AssertionError(command)

    def ask(self, query: Query) -> list[Answered]:
        if isinstance(query, ReadyEntries):
            self._ready = {kind: min(count, self._ready[kind] + 7) for kind, count in self._prepared.items()}
            return [Answered(dict(self._ready))]
        found, self._ended = self._ended, []
        return [Answered(found)]

    def _run_stores(self, ticket: int) -> None:
        """Stores are in order, loads may be later."""
        loads = deque[_Copy]()
        while self._copies and (self._copies[0].command.ticket <= ticket):
            copy = self._copies.popleft()
            if copy.stores:
                self._run(copy)
            else:
                loads.append(copy)
        self._copies = loads + self._copies

    def _run_next(self) -> None:
        """The first copy, or the first load, if it need not wait for the stores before it."""
        load = next((n for n, copy in enumerate(self._copies) if not copy.stores), 0)
        stores = [self._copies[n].command.ticket for n in range(load)]
        if self._random.randrange(2) or any(t <= self._copies[load].command.after for t in stores):  # type: ignore[union-attr]
            load = 0
        copy = self._copies[load]
        del self._copies[load]
        self._run(copy)

    def _run(self, copy: _Copy) -> None:
        for kind, pairs in copy.command.pairs.items():
            assert len({b for _, b in pairs}) == len(pairs), "two contents in one place"
            for first, second in pairs:
                if copy.stores:
                    self.host[kind][second] = self._read(kind, first)
                else:
                    self._write(kind, second, self.host[kind][first])
        if not copy.stores or copy.command.reported:  # type: ignore[union-attr]
            self._ended.append((copy.command.ticket, 1e-3))

    def _read(self, kind: str, place: int) -> Any:
        if kind == "snapshots":
            return self._snapshots[place]
        return {o: self._cache[place, o] for o in self._offsets if (place, o) in self._cache}

    def _write(self, kind: str, place: int, content: Any) -> None:
        if kind == "snapshots":
            self._snapshots[place] = content
        else:
            self._cache |= {(place, offset): value for offset, value in content.items()}


def simulated_tiers(
    rank: SimulatedRank, scheduler: Scheduler, limits: SchedulerLimits, layout: CacheLayout, config: TierConfig,
    further: Sequence[FurtherTier] = (),
) -> Tiers:  # fmt: skip
    """The part over a simulated rank."""

    class Simulated(Tiers):
        def further_tiers(self) -> list[FurtherTier]:
            return list(further)

    executor: Any = SimpleNamespace(do=rank.do, ask=rank.ask, block_bytes=[1], snapshot_bytes=[1], layout=layout)
    nothing: Any = None
    setup = CoreSetup(tiers=config)
    return Simulated(PartContext(executor, scheduler, limits, nothing, nothing, SchedulerConfig(), setup))
