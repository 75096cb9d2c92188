"""TierPool: one pool of the device's cache with its copies in host memory: what must be copied before it is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    superseded: whether what a place holds is not worth a copy when it is evicted; None: all is.
    for_loads: places are given out now for copies from host memory, which come after all stores.
    evicts: contents that are worth a copy were evicted, or will soon be.
    num_stored: copies that were made.
    """

    def __init__(
        self, kind: str, pool: BlockPool, host: HostCache, wait: Callable[[int], None], ahead: int,
        superseded: Callable[[int], bool] | None = None,
    ) -> None:  # fmt: skip
        self.kind, self.pool, self.host, self.ahead = kind, pool, host, ahead
        self._wait, self.writes, self.first = wait, False, int(kind == SNAPSHOTS)
        self._superseded = superseded
        self.num_stored, self.for_loads, self.evicts = 0, False, False
        self._lost = dict[int, Key]()  # by place: what was evicted without a copy, and is still there
        self._displaced = dict[int, Key]()  # of these: in places that copies from host memory write next
        self._fresh = dict[int, Key]()  # by place: contents that are to be copied at once
        self._next = dict[int, Key]()  # by place: what is evicted next, as far as it was not looked at
        self._stored_by = dict[int, int]()  # by entry of host memory: the ticket of the store that has written it last
        self._load_after = 0  # the last store that reads from places which loads get
        self._copying = dict[int, int]()  # by place: the ticket of its copy, which may have ended
        self._awaited = 0
        self._placed_now = list[tuple[Key, int]]()
        self._changed = ahead  # contents that have come or gone, since the last look ahead
        pool.observers.append(self)
        host.observers.append(_Copied(pool))

    def _key(self, key: Key) -> Key:
        return (SNAPSHOT, key[1]) if self.kind == SNAPSHOTS else key

    def stored(self, block: int, key: Key) -> None:
        self._changed += 1
        self._lost.pop(block, None)  # an import, which has written there at once
        if not self.ahead and not self.pool.has_empty:
            self.evicts = True
        if self.writes:
            self._fresh[block] = self._key(key)

    def evicted(self, block: int, key: Key) -> None:
        self._changed += 1
        key = self._key(key)
        self._fresh.pop(block, None)
        self._next.pop(block, None)
        ticket = self._copying.pop(block, 0)
        if self.for_loads:
            self._load_after = max(self._load_after, ticket)
        elif ticket > self._awaited:
            self._awaited = ticket
            self._wait(ticket)
        if self._superseded is not None and self._superseded(block - self.first):
            self.host.demote(key)
            return
        self.evicts = True
        if self.host.find(key) < 0:
            (self._displaced if self.for_loads else self._lost)[block] = key

    def outdated(self, key: Key) -> None:
        self.host.demote(self._key(key))

    def cleared(self) -> None:
        """Copies in host memory stay: they are still right."""
        if self._copying:
            self._wait(max(self._copying.values()))
        self._lost.clear()
        self._displaced.clear()
        self._copying.clear()
        self._fresh.clear()
        self._next.clear()

    def copy_soon(self, key: Key) -> None:
        """Copy what the device has of a key, as soon as can be; nothing where there is a copy."""
        place = self.pool.find(*_in_pool(key))
        if place and self.host.find(key) < 0:
            self._fresh[place] = key

    @property
    def has_new(self) -> bool:
        """Whether contents are to be copied as soon as a step is planned."""
        return bool(self._fresh)

    @property
    def num_lost(self) -> int:
        """Evictions without a copy since `rescues` and `displaced`."""
        return len(self._lost) + len(self._displaced)

    def rescues(self) -> Pairs:
        """(place, entry) of all that was evicted without a copy, to be copied before steps write anything."""
        return self._take(self._lost)

    def displaced(self) -> Pairs:
        """(place, entry) of all that was evicted without a copy for copies from host memory. Steps go on meanwhile."""
        return self._take(self._displaced)

    def _take(self, lost: dict[int, Key]) -> Pairs:
        if not lost:
            return []
        blocks = {key: block for block, key in lost.items()}
        lost.clear()
        return self._placed(blocks)

    def copies(self, most: int, loading: bool = False) -> Pairs:
        """(place, entry) of what is worth copying while steps run: all that is new, and so many of what is evicted
        next, in this order. They are copied in parts, see `stores`. loading: copies to the device run, which are
        faster by themselves; half of what is evicted next may wait for their end."""
        if self.ahead and self._changed * 8 >= self.ahead:
            if loading and self._changed * 2 < self.ahead:
                most = 0
            else:
                self._changed = 0
                self._next = {place: self._key(key) for place, key in self.pool.next_evicted(self.ahead)}
                self.evicts |= bool(self._next)
        if not (self._fresh or (self._next and most)):
            return []
        blocks = {key: place for place, key in self._fresh.items()}
        self._fresh.clear()
        find = self.host.find
        while self._next and most:
            place = next(iter(self._next))
            key = self._next.pop(place)
            if find(key) < 0:
                blocks[key] = place
                most -= 1
        return self._placed(blocks)

    def stores(self, pairs: Pairs, ticket: int, ahead: bool) -> None:
        """These copies have this ticket. ahead: of their eviction."""
        self._stored_by.update((entry, ticket) for _, entry in pairs)
        if ahead:
            self._copying.update((place + self.first, ticket) for place, _ in pairs)

    def load_after(self, pairs: Pairs) -> int:
        """The last store that must have ended before (entry, place) are copied to the device, after all `displaced` got
        their tickets."""
        find = self._stored_by.get
        return max(self._load_after, max((find(entry, 0) for entry, _ in pairs), default=0))

    def unsaved(self) -> list[tuple[Key, int]]:
        """Keys and places of what is on the device only and held by nobody, the most recently used first, as far as
        host memory could hold all that is on the device. What lies there already counts as used."""
        held = [(self._key(key), place) for place, key in self.pool.next_evicted(len(self.pool.references))]
        held = held[-self.host.num_entries :]
        for key, _ in held:
            self.host.use(key)
        return [(key, place) for key, place in reversed(held) if self.host.find(key) < 0]

    def save(self, entries: Sequence[tuple[Key, int]]) -> Pairs:
        """(place, entry) of copies to be made now."""
        return self._placed(dict(entries))

    def _placed(self, blocks: Mapping[Key, int]) -> Pairs:
        placed = self.host.store(blocks)
        self.num_stored += len(placed)
        self._placed_now += placed
        return [(blocks[key] - self.first, entry) for key, entry in placed]

    def placed(self, count: int) -> list[tuple[Key, int]]:
        """Keys and entries of so many copies, in the order in which they were asked for, each of them once."""
        found, self._placed_now = self._placed_now[:count], self._placed_now[count:]
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
