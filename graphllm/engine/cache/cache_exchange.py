"""CacheExchange: what a cache gives to another engine's cache, and takes from one, by digests of prefixes. No torch."""

from __future__ import annotations

from typing import NamedTuple

from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.requests.request_table import RequestState


class Exported(NamedTuple):
    """A block, or with group -1 a snapshot, and the digest that it is found by."""

    group: int
    digest: bytes
    number: int


class CacheExchange:
    """cache: one engine's."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        # By the group of an export: the pool, its key there, and what its block 0 stands for.
        self._pools = {g.number: (cache.pool, g.number, 0) for g in cache.groups}
        self._pools.update((-1, (snapshots.pool, 0, 1)) for snapshots in cache.states.pools)

    def export(self, request: EngineRequest) -> list[Exported]:
        """What the cache has of the prompt of a request (its last token is never there), by digests that other
        processes with the same secret find it by."""
        state = RequestState(request, (0, 0))
        end = (state.num_tokens - 1) // self._cache.boundary * self._cache.boundary
        self._cache.hasher.digest(state, end)
        hit = self._cache.find(state.digests, end) if self._cache.caching else None
        if hit is None:
            return []
        found = []
        for group, blocks in zip(self._cache.groups, hit.blocks, strict=True):
            each = group.unit // self._cache.block_size
            found += [Exported(group.number, state.digests[(i + 1) * each - 1], b) for i, b in enumerate(blocks) if b]
        last = state.digests[hit.num_tokens // self._cache.block_size - 1]
        return [*found, *(Exported(-1, last, hit.snapshot) for _ in self._cache.states.pools)]

    def adopt(self, group: int, digest: bytes) -> int:
        """A block of a group, or with group -1 a snapshot, that is found by that digest from now on and that the caller
        writes; -1 if there is one already or there is no room. It is held until `settle`."""
        pool, key, first = self._pools.get(group, (self._cache.pool, -1, 0))
        if not self._cache.caching or key < 0 or pool.find(key, digest) or not pool.free_blocks:
            return -1
        if group < 0:
            return self._cache.states.pools[group].adopt(digest)
        number = pool.allocate()
        pool.store(number, key, digest)
        return number - first

    def settle(self, group: int, number: int) -> None:
        """Let go of what was adopted. Settle the end of a prefix first: it is then the first to be reused."""
        pool, _, first = self._pools[group]
        pool.release([number + first])
