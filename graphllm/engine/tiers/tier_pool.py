"""TierPool: one pool of the device's cache with its copies in host memory: what must be copied before it is lost."""

from __future__ import annotations

from collections.abc import Mapping

from graphllm.engine.cache.block_pool import BlockPool, Key
from graphllm.engine.cache.pool_observer import PoolObserver
from graphllm.engine.tiers.host_cache import HostCache

Pairs = list[tuple[int, int]]
BLOCKS, SNAPSHOTS = "blocks", "snapshots"  # kinds of entries


class TierPool(PoolObserver):
    """Listens to a pool.

    kind: of its entries, BLOCKS or SNAPSHOTS.
    first: the number of the pool's first place for commands, 1 in a pool of snapshots, whose commands count from 0.
    group: in keys of copies; None: the pool's own.
    host: the copies.
    ahead: places that are given out next, whose contents are copied before that.
    writes: all contents are copied as soon as they can be found.
    num_stored: copies that were made.
    """

    def __init__(
        self, kind: str, pool: BlockPool, host: HostCache, first: int = 0, group: int | None = None, ahead: int = 0,
        writes: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.pool, self.host, self.first, self.ahead = kind, pool, host, first, ahead
        self._group, self.writes = group, writes
        self.num_stored = 0
        # By place: the key of what was evicted and is still there, without a copy, and with one that may still read it.
        self._lost = dict[int, Key]()
        self._read = dict[int, tuple[Key, int]]()
        self._fresh = dict[int, Key]()  # by place: contents that are to be copied at once
        self._copying = dict[int, int]()  # by place: the ticket of its copy, which may have ended
        self._placed_now = list[tuple[Key, int]]()
        self._evicted = ahead  # since the last look ahead
        pool.observers.append(self)

    def _key(self, key: Key) -> Key:
        return key if self._group is None else (self._group, key[1])

    def stored(self, block: int, key: Key) -> None:
        # Before the next step only an import stores into what was just evicted, and it writes at once.
        self._lost.pop(block, None)
        if (read := self._read.pop(block, None)) is not None:
            self.host.drop(read[0])
        if self.writes:
            self._fresh[block] = self._key(key)

    def evicted(self, block: int, key: Key) -> None:
        self._evicted += 1
        key = self._key(key)
        self._fresh.pop(block, None)
        ticket = self._copying.pop(block, 0)
        if self.host.find(key) < 0:
            self._lost[block] = key
        elif ticket:
            self._read[block] = key, ticket

    def cleared(self) -> None:
        self._lost.clear()
        self._read.clear()
        self._copying.clear()
        self._fresh.clear()
        self.host.clear()

    def copy_soon(self, key: Key) -> None:
        """Copy what the device has of a key, as soon as can be; nothing where there is a copy."""
        place = self.pool.find(key[0] if self._group is None else 0, key[1])
        if place and self.host.find(key) < 0:
            self._fresh[place] = key

    def awaited(self) -> int:
        """The last copy that must end before what it reads is written; 0 for none. Asked for once."""
        last = max((ticket for _, ticket in self._read.values()), default=0)
        self._read.clear()
        return last

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
