"""BlockPool: numbered places of equal size, who holds them, and which hold what a later request may share.

The blocks of the paged cache come from one pool, the snapshots of recurrent states from another. A block holds the
tokens of one cache group in every layer of it. Blocks that nobody holds stay findable by their content until they are
given out again, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from graphllm.engine.cache.pool_observer import PoolObserver

Key = tuple[int, bytes]  # cache group, digest of the tokens up to the block's end


class BlockPool:
    """Blocks of the cache, with reference counts.

    num_blocks: blocks, with block 0, which is never given out.
    caching: whether contents are remembered.
    observers: hear what can be found, and what no more.
    """

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.caching, self.observers = caching, list[PoolObserver]()
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.references = [0] * num_blocks
        self._key_of: list[Key | None] = [None] * num_blocks
        self._cached: dict[Key, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self) -> int:
        """A block for one holder; what it held is forgotten. Raises KeyError when there is none."""
        return self.allocate_all(1)[0]

    def allocate_all(self, count: int) -> list[int]:
        """So many. Raises KeyError, and allocates none, when there are fewer."""
        if count > len(self._free):
            raise KeyError(count)
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self.references[block] = 1
        return blocks

    def hold(self, block: int) -> None:
        """One more holder of a block, which may be free and cached."""
        if self.references[block] == 0:
            del self._free[block]
        self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each block. Give a sequence's last block first: it is then the first to be reused."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = None
                if self._key_of[block] is None:
                    self._free.move_to_end(block, last=False)

    @property
    def has_empty(self) -> bool:
        """Whether a free block holds nothing that can be found."""
        return bool(self._free) and self._key_of[next(iter(self._free))] is None

    def next_evicted(self, count: int) -> list[tuple[int, Key]]:
        """Blocks with contents among the next ``count`` that are given out."""
        return [(b, key) for b in islice(self._free, count) if (key := self._key_of[b]) is not None]

    def take(self, block: int) -> None:
        """Allocate this block, which is free."""
        self._free.move_to_end(block, last=False)
        self.allocate()

    def exclusive(self, block: int) -> bool:
        """Whether its only holder may write into it."""
        return self.references[block] == 1 and self._key_of[block] is None

    def find(self, group: int, digest: bytes) -> int:
        """The block with that content, 0 when there is none."""
        return self._cached.get((group, digest), 0)

    def store(self, block: int, group: int, digest: bytes) -> None:
        """Remember what a full block holds. Of two blocks with one content, the first stays the one that is found."""
        key = (group, digest)
        if self._key_of[block] is None and key not in self._cached:
            self._cached[key] = block
            self._key_of[block] = key
            for observer in self.observers:
                observer.stored(block, key)

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._cached[key]
            self._key_of[block] = None
            for observer in self.observers:
                observer.evicted(block, key)

    def reset_cache(self) -> bool:
        """Forget all contents; False, and nothing done, while any block is held."""
        if len(self._free) != len(self.references) - 1:
            return False
        self._cached, self._key_of = {}, [None] * len(self.references)
        for observer in self.observers:
            observer.cleared()
        return True
