"""HostCache: which contents of the device's cache lie in host memory, in entries of equal size. No policy of its own,
no bytes: ranks have them (`graphllm.runtime.tiers`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.cache.pool_observer import PoolObserver
from graphllm.engine.tiers.policies import POLICIES


class HostCache:
    """Entries by the key of what they hold.

    num_entries: of host memory, once all are `ready`.
    policy: "lru" or "arc".
    observers: hear which keys can be found, and which no more; their "block" is the entry.
    """

    def __init__(self, num_entries: int, policy: str = "lru") -> None:
        self.num_entries, self._policy = num_entries, POLICIES[policy](num_entries)
        self._ready, self._free = 0, list[int]()
        self._entry_of = dict[Key, int]()
        self._coming = dict[Key, int]()  # entries that are being filled from further away
        self._unwanted = set[Key]()  # of these: what is forgotten already
        self._pins = Counter[Key]()
        self._held_back = dict[Key, list[int]]()  # entries of pinned keys that are forgotten already
        self.observers = list[PoolObserver]()

    def ready(self, count: int) -> None:
        """So many entries, the first ones, can be used."""
        self._free[:0] = range(count - 1, self._ready - 1, -1)
        self._ready = count

    @property
    def is_ready(self) -> bool:
        """Whether all entries can be used."""
        return self._ready == self.num_entries

    @property
    def num_used(self) -> int:
        """Entries that hold something, or are to."""
        return max(0, self._ready - len(self._free))

    def __len__(self) -> int:
        """Entries that hold something."""
        return len(self._entry_of)

    def find(self, key: Key) -> int:
        """The entry with that content, -1 where there is none."""
        return self._entry_of.get(key, -1)

    @property
    def any_coming(self) -> bool:
        """Whether an entry is being filled."""
        return bool(self._coming)

    def is_coming(self, key: Key) -> bool:
        """Whether an entry is being filled with it."""
        return key in self._coming and key not in self._unwanted

    def store(self, keys: Iterable[Key]) -> list[tuple[Key, int]]:
        """Entries for keys that have none, to be written by a copy that comes before any other of these entries; others
        go for them. Keys without room are left out."""
        found = []
        for key in keys:
            if key in self._entry_of or key in self._coming or (entry := self._room()) < 0:
                continue
            self._add(key, entry)
            self._pins[key] += 1  # one copy writes them all
            found.append((key, entry))
        self.unpin(key for key, _ in found)
        return found

    def expect(self, key: Key) -> int:
        """An entry that is about to be filled from further away, until `arrived` or `failed`; -1 without room, and
        while the key comes for the last time before `clear`."""
        entry = -1 if key in self._coming else self._room()
        if entry >= 0:
            self._coming[key] = entry
        return entry

    def arrived(self, key: Key) -> None:
        """The entry of an expected key is filled."""
        if key in self._unwanted:
            self.failed(key)
        else:
            self._add(key, self._coming.pop(key))

    def failed(self, key: Key) -> None:
        """An expected key does not come."""
        self._unwanted.discard(key)
        self._free.append(self._coming.pop(key))

    def _add(self, key: Key, entry: int) -> None:
        self._entry_of[key] = entry
        self._policy.add(key)
        for observer in self.observers:
            observer.stored(entry, key)

    def _room(self) -> int:
        if self._free:
            return self._free.pop()
        key = self._policy.evict(self._pins)
        return -1 if key is None else self._forget(key)

    def _forget(self, key: Key) -> int:
        entry = self._entry_of.pop(key)
        for observer in self.observers:
            observer.evicted(entry, key)
        return entry

    def use(self, key: Key) -> None:
        """A copy, if there is one, is wanted: it counts as recently used."""
        if key in self._entry_of:
            self._policy.use(key)

    def demote(self, key: Key) -> None:
        """A copy, if there is one, is hardly wanted any more: it goes before others."""
        if key in self._entry_of:
            self._policy.demote(key)

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep the entries of these keys until `unpin`."""
        self._pins.update(iter(keys))  # of a mapping it would add the values

    def unpin(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                self._pins.pop(key)
                self._free += self._held_back.pop(key, ())

    @property
    def pinned(self) -> int:
        """Keys that are kept."""
        return len(self._pins)

    def drop(self, key: Key) -> None:
        """Forget a copy, if there is one. It is not pinned."""
        if key in self._entry_of:
            self._policy.remove(key)
            self._free.append(self._forget(key))

    def clear(self) -> None:
        """Forget all copies, also those that are expected. Who has pinned one may still read its entry."""
        self._unwanted.update(self._coming)
        for key, entry in self._entry_of.items():
            (self._held_back.setdefault(key, []) if key in self._pins else self._free).append(entry)
        self._entry_of.clear()
        self._policy.clear()
        for observer in self.observers:
            observer.cleared()
