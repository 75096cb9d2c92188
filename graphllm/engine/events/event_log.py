"""EventLog: hears what happens to pools of blocks and, once a step, says what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphllm.engine.cache.block_pool import BlockPool
from graphllm.engine.cache.pool_observer import PoolObserver
from graphllm.engine.events.chains import Chains, Place
from graphllm.engine.events.records import Cleared, Record, Removed, Stored
from graphllm.engine.events.structs import GPU
from graphllm.engine.schedule.scheduler_output import SchedulerOutput


class _Happened(NamedTuple):
    """An entry of the log. stored: else removed. digest: None where all was forgotten."""

    stored: bool
    group: int
    digest: bytes | None
    medium: str


_CLEARED = _Happened(False, 0, None, GPU)


class _Listener(PoolObserver):
    """Of one pool. first: number that events have for its group 0."""

    def __init__(self, entries: list[_Happened], wanted: set[bytes], first: int) -> None:
        self._entries, self._wanted, self._first = entries, wanted, first

    def stored(self, block: int, key: tuple[int, bytes]) -> None:
        self._entries.append(_Happened(True, self._first + key[0], key[1], GPU))
        self._wanted.add(key[1])

    def evicted(self, block: int, key: tuple[int, bytes]) -> None:
        self._entries.append(_Happened(False, self._first + key[0], key[1], GPU))

    def cleared(self) -> None:
        if not self._entries or self._entries[-1] is not _CLEARED:  # pools are cleared together
            self._entries.append(_CLEARED)

    def copied(self, medium: str, key: tuple[int, bytes]) -> None:
        self._entries.append(_Happened(True, self._first + key[0], key[1], medium))

    def dropped(self, medium: str, key: tuple[int, bytes]) -> None:
        self._entries.append(_Happened(False, self._first + key[0], key[1], medium))


class EventLog:
    """What happened since it was last taken, in order.

    chains: say which tokens lie in a block.
    units: tokens of a block of each group.
    """

    def __init__(self, chains: Chains, units: Sequence[int]) -> None:
        self._chains, self._units = chains, units
        self._entries: list[_Happened] = []
        self._wanted: set[bytes] = set()  # of what was stored

    def __bool__(self) -> bool:
        return bool(self._entries)

    def listen(self, pool: BlockPool, first: int = 0) -> None:
        """Hear of a pool. first: number that events have for its group 0."""
        pool.observers.append(_Listener(self._entries, self._wanted, first))

    def take(self, plan: SchedulerOutput | None) -> list[Record]:
        """The records of what happened. plan: of the step whose result was just taken, if any."""
        places = self._chains.find(self._wanted, plan) if self._wanted else {}
        self._wanted.clear()
        records: list[Record] = []
        run: _Run | None = None
        for stored, group, digest, medium in self._entries:
            place = places.get(digest) if stored and medium == GPU and digest is not None else None
            if run is not None and (place is None or not run.goes_on(group, place)):
                records.append(self._record(run))
                run = None
            if place is not None:
                run = run or _Run(group, place, self._units[group] // self._chains.block_size)
                run.last = place.number
            elif digest is None:
                records.append(Cleared())
            elif stored:
                records.append(Stored(group, [digest], medium))
            elif records and isinstance(last := records[-1], Removed) and (last.group, last.medium) == (group, medium):
                last.digests.append(digest)
            else:
                records.append(Removed(group, [digest], medium))
        if run is not None:
            records.append(self._record(run))
        self._entries.clear()
        return records

    def _record(self, run: _Run) -> Stored:
        return run.record(self._chains.block_size, self._units[run.group])


class _Run:
    """Consecutive blocks of one sequence. each: digests from one block to the next."""

    def __init__(self, group: int, place: Place, each: int) -> None:
        self.group, self._state, self._first, self._each = group, place.state, place.number, each
        self.last = place.number

    def goes_on(self, group: int, place: Place) -> bool:
        """Whether a block is the next one."""
        return group == self.group and place.state is self._state and place.number == self.last + self._each

    def record(self, size: int, unit: int) -> Stored:
        """What was stored. size: tokens from one digest to the next. unit: tokens of a block."""
        state, each = self._state, self._each
        parent = self._first - each
        start, end = (self._first + 1) * size - unit, (self.last + 1) * size
        return Stored(
            self.group,
            state.digests[self._first : self.last + 1 : each],
            GPU,
            state.digests[parent] if parent >= 0 else None,
            start,
            state.tokens(start, end),
            state.request,
        )
