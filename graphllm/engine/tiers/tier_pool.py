"""TierPool: one pool of the device's cache with its copies in host memory: what must be copied before it is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphllm.engine.cache.block_pool import BlockPool, Key
from graphllm.engine.cache.pool_observer import PoolObserver
from graphllm.engine.tiers.host_cache import HostCache
from graphllm.engine.tiers.wanted import SNAPSHOT

Pairs = list[tuple[int, int]]
BLOCKS, SNAPSHOTS = "blocks", "snapshots"  # kinds of entries


def kind_of(key: Key) -> str:
    """The kind of the entries that hold a key's contents."""
    return SNAPSHOTS if key[0] == SNAPSHOT else BLOCKS


class TierPool(PoolObserver):
    """Listens to a pool.

    kind: of its entries, BLOCKS or SNAPSHOTS.
    wait: has later steps and commands wait for the stores up to a ticket.
    host: the copies.
    ahead: places that are given out next, whose contents are copied before that.
    first: the number of the pool's first place for commands, 1 in a pool of snapshots, whose commands count from 0.
    writes: all contents are copied as soon as they can be found.
    num_stored: copies that were made.
    """

    def __init__(
        self, kind: str, pool: BlockPool, host: HostCache, wait: Callable[[int], None], ahead: int, writes: bool
    ) -> None:
        self.kind, self.pool, self.host, self.ahead = kind, pool, host, ahead
        self._wait, self.writes, self.first = wait, writes, int(kind == SNAPSHOTS)
        self.num_stored = 0
        self._lost = dict[int, Key]()  # by place: what was evicted without a copy, and is still there
        self._fresh = dict[int, Key]()  # by place: contents that are to be copied at once
        self._copying = dict[int, int]()  # by place: the ticket of its copy, which may have ended
        self._awaited = 0
        self._placed_now = list[tuple[Key, int]]()
        self._evicted = ahead  # since the last look ahead
        pool.observers.append(self)
        host.observers.append(_Copied(pool))

    def _key(self, key: Key) -> Key:
        return (SNAPSHOT, key[1]) if self.kind == SNAPSHOTS else key

    def stored(self, block: int, key: Key) -> None:
        self._lost.pop(block, None)  # an import, which has written there at once
        if self.writes:
            self._fresh[block] = self._key(key)

    def evicted(self, block: int, key: Key) -> None:
        self._evicted += 1
        key = self._key(key)
        self._fresh.pop(block, None)
        ticket = self._copying.pop(block, 0)
        if ticket > self._awaited:
            self._awaited = ticket
            self._wait(ticket)
        if self.host.find(key) < 0:
            self._lost[block] = key

    def cleared(self) -> None:
        """Copies in host memory stay: they are still right."""
        if self._copying:
            self._wait(max(self._copying.values()))
        self._lost.clear()
        self._copying.clear()
        self._fresh.clear()

    def copy_soon(self, key: Key) -> None:
        """Copy what the device has of a key, as soon as can be; nothing where there is a copy."""
        place = self.pool.find(*_in_pool(key))
        if place and self.host.find(key) < 0:
            self._fresh[place] = key

    @property
    def nearly_full(self) -> bool:
        """Whether most places hold something, so that contents will soon be evicted."""
        return 4 * self.pool.num_cached >= 3 * (len(self.pool.references) - 1)

    @property
    def has_new(self) -> bool:
        """Whether contents are to be copied as soon as a step is planned."""
        return bool(self._fresh)

    def rescues(self) -> Pairs:
        """(place, entry) of all that was evicted without a copy, to be copied before anything is written."""
        if not self._lost:
            return []
        blocks = {key: block for block, key in self._lost.items()}
        self._lost.clear()
        return self._placed(blocks)

    def copies(self, ticket: int) -> Pairs:
        """(place, entry) of what is worth copying ahead of its eviction, while steps run; the copy has this ticket."""
        blocks = {key: block for block, key in self._fresh.items()}
        self._fresh.clear()
        if self.ahead and self._evicted * 4 >= self.ahead:
            self._evicted = 0
            blocks |= {self._key(key): block for block, key in self.pool.next_evicted(self.ahead)}
        if not blocks:
            return []
        pairs = self._placed({key: block for key, block in blocks.items() if self.host.find(key) < 0})
        self._copying.update((place + self.first, ticket) for place, _ in pairs)
        return pairs

    def _placed(self, blocks: Mapping[Key, int]) -> Pairs:
        placed = self.host.store(blocks)
        self.num_stored += len(placed)
        self._placed_now += placed
        return [(blocks[key] - self.first, entry) for key, entry in placed]

    def placed(self) -> list[tuple[Key, int]]:
        """Keys and entries of the copies that `rescues` and `copies` have asked for since this was last asked."""
        found, self._placed_now = self._placed_now, []
        return found


def _in_pool(key: Key) -> Key:
    """As the device's pool has it: the group of snapshots is 0 there."""
    return max(0, key[0]), key[1]


class _Copied(PoolObserver):
    """Listens to host memory, and tells the observers of the device's pool of the copies."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def stored(self, block: int, key: Key) -> None:
        for observer in self._pool.observers:
            observer.copied("CPU", _in_pool(key))

    def evicted(self, block: int, key: Key) -> None:
        for observer in self._pool.observers:
            observer.dropped("CPU", _in_pool(key))
