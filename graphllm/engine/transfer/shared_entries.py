"""SharedEntries: which contents of this engine's host memory other engines may copy, and which are kept for one.

The core's thread says what is there and what goes; threads that serve other engines look it up. Nothing is pinned for
an engine that copies: it asks after its copy whether all was still there, and throws away what was not. So nobody waits
for an engine that is gone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.cache.pool_observer import PoolObserver
from graphllm.engine.tiers.host_cache import HostCache
from graphllm.engine.tiers.tier_pool import SNAPSHOTS, kind_of
from graphllm.engine.tiers.wanted import SNAPSHOT


@dataclass(eq=False)
class Lease:
    """What one engine was told. lost: of these keys, what is there no more."""

    keys: frozenset[Key]
    lost: set[Key] = field(default_factory=set)


@dataclass(eq=False)
class _Kept:
    """A request's contents. awaited: not there yet. pinned: in host memory. until: seconds of `time.monotonic`."""

    awaited: set[Key]
    pinned: list[Key]
    until: float


class SharedEntries:
    """hosts: host memory, by kind. At most half of it is kept for others, unless one request needs more."""

    def __init__(self, hosts: Mapping[str, HostCache]) -> None:
        self._most = {kind: host.num_entries // 2 for kind, host in hosts.items()}
        self._changed = threading.Condition()
        self._ready = dict[Key, int]()
        self._kept = dict[str, _Kept]()
        self._fetched = set[str]()  # requests that need not be kept any more
        self._leases = set[Lease]()
        for kind, host in hosts.items():
            host.observers.append(_Listener(self, kind))

    # The core's thread

    def offered(self, entries: Iterable[tuple[Key, int]]) -> list[Key]:
        """Host memory has these contents on every rank. What is to be pinned of them, once for each time that it is
        listed."""
        pins = list[Key]()
        with self._changed:
            for key, entry in entries:
                self._ready[key] = entry
                for kept in self._kept.values():
                    if key in kept.awaited:
                        kept.awaited.discard(key)
                        kept.pinned.append(key)
                        pins.append(key)
            self._changed.notify_all()
        return pins

    def keep(self, id: str, keys: Sequence[Key], seconds: float) -> tuple[list[Key], list[Key]]:
        """Keep a request's contents until they were fetched, for so many seconds at most. What is to be pinned of them,
        and what is not there yet."""
        with self._changed:
            there = [key for key in keys if key in self._ready]
            missing = [key for key in keys if key not in self._ready]
            self._kept[id] = _Kept(set(missing), list(there), time.monotonic() + seconds)
            self._changed.notify_all()
        return there, missing

    def let_go(self) -> list[Key]:
        """What is to be unpinned of requests that were fetched, or kept for long enough."""
        if not self._kept:
            return []
        now, pins = time.monotonic(), list[Key]()
        with self._changed:
            for id in [id for id, kept in self._kept.items() if id in self._fetched or kept.until < now]:
                pins += self._kept.pop(id).pinned
            self._fetched.clear()
            while len(self._kept) > 1 and self._too_many():
                pins += self._kept.pop(next(iter(self._kept))).pinned
        return pins

    def _too_many(self) -> bool:
        kinds = Counter(kind_of(key) for kept in self._kept.values() for key in kept.pinned)
        return any(kinds[kind] > most for kind, most in self._most.items())

    @property
    def num_kept(self) -> int:
        """Requests whose contents are kept."""
        return len(self._kept)

    def evicted(self, key: Key) -> None:
        """Host memory is about to lose this."""
        with self._changed:
            self._ready.pop(key, None)
            for lease in self._leases:
                if key in lease.keys:
                    lease.lost.add(key)

    def cleared(self, kind: str) -> None:
        """Host memory has lost all of a kind."""
        with self._changed:
            for key in [key for key in self._ready if (key[0] == SNAPSHOT) == (kind == SNAPSHOTS)]:
                del self._ready[key]
            for lease in self._leases:
                lease.lost |= lease.keys

    # Threads that serve other engines

    def lease(self, id: str, keys: Sequence[Key], patience: float) -> tuple[Lease, list[int], bool]:
        """What there is of these keys: entries, -1 for none. id: of a kept request, whose contents are waited for, so
        many seconds at most. Whether it is kept."""
        deadline = time.monotonic() + patience
        with self._changed:
            while (kept := self._kept.get(id)) is not None and kept.awaited:
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            entries = [self._ready.get(key, -1) for key in keys]
            lease = Lease(frozenset(key for key, entry in zip(keys, entries, strict=True) if entry >= 0))
            self._leases.add(lease)
            return lease, entries, kept is not None

    def lost(self, lease: Lease) -> set[Key]:
        """What is there no more of what was found."""
        with self._changed:
            return set(lease.lost)

    def end(self, lease: Lease, id: str) -> None:
        """An engine is done. id: of a request that is kept no more."""
        with self._changed:
            self._leases.discard(lease)
            if id in self._kept:
                self._fetched.add(id)


class _Listener(PoolObserver):
    def __init__(self, entries: SharedEntries, kind: str) -> None:
        self._entries, self._kind = entries, kind

    def evicted(self, block: int, key: Key) -> None:
        self._entries.evicted(key)

    def cleared(self) -> None:
        self._entries.cleared(self._kind)
