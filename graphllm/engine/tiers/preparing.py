"""Preparing: host memory is made ready as it is needed. An engine whose cache suffices takes none of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from graphllm.engine.tiers.tier_pool import TierPool
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.tiers import PrepareEntries, ReadyEntries

_BETWEEN = 0.001  # seconds between two looks of a step that waits
_AGAIN = 0.02  # seconds between two looks at what is being prepared
_MOMENT = 0.5  # seconds that a step waits for room, at most, and once
_RESERVE = 4 << 30  # bytes that are ready and hold nothing: a second of a GPU's fastest prompts


class Ranks(Protocol):
    """The part of an executor that prepares memory."""

    def do(self, command: Command) -> None: ...

    def ask(self, query: Query) -> list[Answered]: ...


class Preparing:
    """pools: by kind. entry_bytes: of an entry of each kind, of all ranks together."""

    def __init__(self, executor: Ranks, pools: Mapping[str, TierPool], entry_bytes: Mapping[str, int]) -> None:
        self._executor, self._pools = executor, pools
        self._reserve = {kind: max(2 * pool.ahead, _RESERVE // entry_bytes[kind]) for kind, pool in pools.items()}
        self._asked = dict.fromkeys(pools, 0)
        self._ready = dict.fromkeys(pools, -1)
        self._look_at = 0.0
        self._waits = True

    def look(self, early: bool) -> None:
        """Have more prepared where little is left, and take what is ready. early: also before the device is full."""
        if early or any(pool.evicts for pool in self._pools.values()):
            self._prepare({
                kind: min(pool.host.num_entries, pool.host.num_used + 2 * self._reserve[kind])
                for kind, pool in self._pools.items()
                if self._asked[kind] < min(pool.host.num_entries, pool.host.num_used + self._reserve[kind])
            })  # fmt: skip
        if any(self._ready[kind] < asked for kind, asked in self._asked.items()) and time.monotonic() >= self._look_at:
            self._take()

    def has_room(self, kind: str, count: int) -> bool:
        """Have so many entries prepared that hold nothing, or all that are left; whether they are."""
        host = self._pools[kind].host
        wanted = min(host.num_entries, host.num_used + count)
        if self._asked[kind] < wanted:
            self._prepare({kind: wanted})
        if self._ready[kind] < wanted:
            self._take()
        return self._ready[kind] >= wanted

    def make_room(self, counts: Mapping[str, int]) -> None:
        """Wait until so many more of each kind can be kept: what is evicted now has no other place. For a moment at
        most; where that was not enough, the ranks have no more memory, and no step waits again."""
        until = time.monotonic() + _MOMENT
        while self._waits and not all(self.has_room(kind, count) for kind, count in counts.items()):
            self._waits = time.monotonic() < until
            time.sleep(_BETWEEN)

    def all(self) -> bool:
        """Have all of it prepared; whether it is."""
        self._prepare({k: p.host.num_entries for k, p in self._pools.items() if self._asked[k] < p.host.num_entries})
        self._take()
        return all(pool.host.is_ready for pool in self._pools.values())

    def _prepare(self, wanted: dict[str, int]) -> None:
        if wanted:
            self._asked.update(wanted)
            self._look_at = 0.0
            self._executor.do(PrepareEntries(dict(reversed(wanted.items()))))  # snapshots first: they are few

    def _take(self) -> None:
        self._look_at = time.monotonic() + _AGAIN
        answers = [answer.value for answer in self._executor.ask(ReadyEntries())]
        for kind, pool in self._pools.items():
            self._ready[kind] = min(entries[kind] for entries in answers)
            pool.host.ready(self._ready[kind])
