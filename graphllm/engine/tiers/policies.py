"""Policies: which copy in host memory makes room for another one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Protocol

from graphllm.engine.cache.block_pool import Key


class Policy(Protocol):
    """An order of keys."""

    def add(self, key: Key) -> None:
        """There is a copy of this key now."""

    def use(self, key: Key) -> None:
        """A copy was used."""

    def demote(self, key: Key) -> None:
        """A copy is hardly wanted any more: it goes before others."""

    def remove(self, key: Key) -> None:
        """A copy is gone, for another reason than room."""

    def evict(self, pinned: Container[Key]) -> Key | None:
        """Choose the copy that goes, and forget it; None where all are pinned."""

    def clear(self) -> None:
        """Forget all."""


class LRU:
    """The least recently used copy goes."""

    def __init__(self, capacity: int) -> None:
        self._keys = OrderedDict[Key, None]()

    def add(self, key: Key) -> None:
        self._keys[key] = None

    def use(self, key: Key) -> None:
        self._keys.move_to_end(key)

    def demote(self, key: Key) -> None:
        self._keys.move_to_end(key, last=False)

    def remove(self, key: Key) -> None:
        del self._keys[key]

    def evict(self, pinned: Container[Key]) -> Key | None:
        key = _first(self._keys, pinned)
        if key is not None:
            del self._keys[key]
        return key

    def clear(self) -> None:
        self._keys.clear()


class ARC:
    """Adaptive replacement between recency and frequency (Megiddo and Modha, FAST 2003).

    recent, frequent: copies that were used once, and more often.
    recent_ghosts, frequent_ghosts: keys of copies that went lately from either; a key that comes back from there moves
        the target.
    target: how many copies ``recent`` should have.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self.target = capacity, 0.0
        self.recent, self.frequent = OrderedDict[Key, None](), OrderedDict[Key, None]()
        self.recent_ghosts, self.frequent_ghosts = OrderedDict[Key, None](), OrderedDict[Key, None]()

    def add(self, key: Key) -> None:
        lost_recent, lost_frequent = len(self.recent_ghosts), len(self.frequent_ghosts)
        if key in self.recent_ghosts:
            self.target = min(self._capacity, self.target + max(1.0, lost_frequent / lost_recent))
            del self.recent_ghosts[key]
            self.frequent[key] = None
        elif key in self.frequent_ghosts:
            self.target = max(0.0, self.target - max(1.0, lost_recent / lost_frequent))
            del self.frequent_ghosts[key]
            self.frequent[key] = None
        else:
            self.recent[key] = None
        self._forget_ghosts()

    def _forget_ghosts(self) -> None:
        while self.recent_ghosts and len(self.recent) + len(self.recent_ghosts) > self._capacity:
            self.recent_ghosts.popitem(last=False)
        copies = len(self.recent) + len(self.frequent)
        while self.frequent_ghosts and (
            copies + len(self.recent_ghosts) + len(self.frequent_ghosts) > 2 * self._capacity
        ):
            self.frequent_ghosts.popitem(last=False)

    def use(self, key: Key) -> None:
        self.recent.pop(key, None)
        self.frequent[key] = None
        self.frequent.move_to_end(key)

    def demote(self, key: Key) -> None:
        self.remove(key)
        self.recent[key] = None
        self.recent.move_to_end(key, last=False)

    def remove(self, key: Key) -> None:
        self.recent.pop(key, None)
        self.frequent.pop(key, None)

    def evict(self, pinned: Container[Key]) -> Key | None:
        order = [(self.recent, self.recent_ghosts), (self.frequent, self.frequent_ghosts)]
        if len(self.recent) <= self.target:
            order.reverse()
        for copies, ghosts in order:
            key = _first(copies, pinned)
            if key is not None:
                del copies[key]
                ghosts[key] = None
                return key
        return None

    def clear(self) -> None:
        self.target = 0.0
        for keys in (self.recent, self.frequent, self.recent_ghosts, self.frequent_ghosts):
            keys.clear()


def _first(keys: OrderedDict[Key, None], pinned: Container[Key]) -> Key | None:
    """The first key that is not pinned. The pinned ones before it go to the end: they are in use, and where many wait
    for a slow disk, they are not looked at again for each copy that goes."""
    for _ in range(len(keys)):
        key = next(iter(keys))
        if key not in pinned:
            return key
        keys.move_to_end(key)
    return None


POLICIES: Mapping[str, Callable[[int], Policy]] = {"lru": LRU, "arc": ARC}
