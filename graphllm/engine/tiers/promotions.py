"""Promotions: what waiting requests have brought to the device from the tiers, before they may join a step.

While a promotion runs, its blocks are nobody else's, its copies in host memory stay, and the request waits; others pass
it. Then its blocks are ordinary cached ones, which the request finds as it finds any. What lies further away than host
memory comes there first.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.resource import Resource
from graphllm.engine.tiers.further_tier import FurtherTier
from graphllm.engine.tiers.host_cache import HostCache
from graphllm.engine.tiers.rates import Rates
from graphllm.engine.tiers.tier_pool import BLOCKS, SNAPSHOTS, Pairs, TierPool, kind_of
from graphllm.engine.tiers.wanted import SNAPSHOT, Wanted, wanted

HOST = "host"
_PATIENCE = 30.0  # seconds that a request waits for what is further away; a disk may hang
_LOOKS = 16  # how often a request that finds nothing asks before it looks again
_MOST = 3  # promotions and fetches after which a request joins, unless they bring it further: what comes may be lost


@dataclass(frozen=True)
class Promotion:
    """What one request has brought to the device.

    state: the request's.
    tokens: that need not be computed then, in addition to the ones that the device has.
    held: blocks that the device has of its beginning, kept until the end.
    snapshot: that it has there, kept as well; -1 for none.
    blocks, snapshots: by the key of what they get, in the order of the sequence.
    """

    state: RequestState
    tokens: int
    held: list[int]
    snapshot: int
    blocks: dict[Key, int]
    snapshots: dict[Key, int]

    @property
    def keys(self) -> dict[str, dict[Key, int]]:
        """The places by key, of each kind that there is."""
        return {kind: of for kind, of in ((BLOCKS, self.blocks), (SNAPSHOTS, self.snapshots)) if of}


class Promotions(Resource):
    """pools: of blocks, and of snapshots if there are any, by kind.

    entry_bytes: of an entry of each kind, of all ranks together.
    further: tiers beyond host memory, the nearest first.
    hits: tokens that came from each tier instead of being computed. What came from further away counts for the host,
        too.
    copied: bytes that came from each tier.
    wanted_anyway: requests for which contents are brought also where computing them would be faster.
    clock: seconds.
    """

    def __init__(
        self, cache: CacheManager, pools: Mapping[str, TierPool], entry_bytes: Mapping[str, int], rates: Rates,
        further: Sequence[FurtherTier] = (),
    ) -> None:  # fmt: skip
        self._cache, self._pools, self._bytes, self._rates = cache, pools, entry_bytes, rates
        self._further = further
        self.hits = dict.fromkeys([HOST, *(tier.name for tier in further)], 0.0)
        self.copied = dict.fromkeys([HOST, *(tier.name for tier in further)], 0)
        self.wanted_anyway = set[str]()
        self._begun = list[Promotion]()  # their copies are to be started
        self._copied = dict[int, Promotion]()  # by the copy's ticket
        self._fetched = dict[str, set[Key]]()  # by request: keys that come from further away
        self._fetcher = dict[Key, str]()  # of these keys: the request
        self._kept = dict[str, list[Key]]()  # by request: what was fetched for it, pinned until it is on its way
        self._tokens = dict[Key, float]()  # of these keys: a share of what the request need not compute
        self._promoted = set[str]()  # requests with a promotion that runs
        self._on_way = set[Key]()  # to the device
        self._had = Counter[str]()  # promotions and fetches of each waiting request, since it came further
        self._reach = dict[str, int]()  # of these requests: tokens that the device had of them at most
        self._has_had = set[str]()  # requests with a fetch whose contents have not been promoted
        self._awaited = dict[str, Key]()  # by request: what comes for another one
        self._since = dict[str, float]()  # by request: when it began to wait
        self.clock = time.monotonic
        self._looked = dict[str, int]()  # requests that found nothing: how often they may ask before they look again

    @property
    def running(self) -> int:
        """Promotions and fetches that have not ended."""
        return len(self._promoted) + len(self._fetched)

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of the device that promotions hold."""
        running = [*self._begun, *self._copied.values()]
        return [block for p in running for block in (*p.held, *p.blocks.values())]

    # What the scheduler asks

    def acquire(self, state: RequestState) -> bool:
        id = state.request.id
        if id in self._promoted:
            return False
        if id in self._since and self.clock() > self._since[id] + _PATIENCE:
            return True
        if id in self._fetched or self._comes(self._awaited.get(id)):
            return False
        self._awaited.pop(id, None)
        if self._had[id] >= _MOST or self._looked.get(id, 0):
            self._looked[id] = max(0, self._looked.get(id, 0) - 1)
            return True
        found = wanted(self._cache, state, self._has)
        if found is None:
            self._looked[id] = _LOOKS
            return True
        if self._is_brought(id, found):
            return False
        if not self._cache.fits(state.num_tokens, found.hit):
            return True  # it waits for blocks first
        if found.hit.num_tokens > self._reach.get(id, 0):
            self._reach[id], self._had[id] = found.hit.num_tokens, 0
        begun = self._begin(state, found)
        self._had[id] += begun
        return not (begun or id in self._awaited)

    def _is_brought(self, id: str, found: Wanted) -> bool:
        """Whether another request has some of it brought; then this one waits for that."""
        if not self._on_way and not any(pool.host.any_coming for pool in self._pools.values()):
            return False
        key = next((key for key in (*found.blocks, *found.snapshots) if self._comes(key)), None)
        if key is not None:
            self._awaited[id] = key
            self._since.setdefault(id, self.clock())
        return key is not None

    def _comes(self, key: Key | None) -> bool:
        return key is not None and (key in self._on_way or self._host(key).is_coming(key))

    def release(self, state: RequestState, joined: bool) -> None:
        if joined:
            self.forget(state.request.id)

    def forget(self, id: str) -> None:
        """A request has ended. What it has had brought comes all the same."""
        del self._had[id]
        self._let_go(id)
        for by_request in (self._looked, self._reach, self._awaited, self._since):
            by_request.pop(id, None)

    def place(self, state: RequestState, table: RequestTable) -> None:
        self._let_go(state.request.id)

    def _let_go(self, id: str) -> None:
        """What was fetched for a request is as any other copy."""
        self._has_had.discard(id)
        for key in self._kept.pop(id, ()):
            self._host(key).unpin([key])

    def _host(self, key: Key) -> HostCache:
        return self._pools[kind_of(key)].host

    def _has(self, key: Key) -> bool:
        host = self._host(key)
        return host.find(key) >= 0 or host.is_coming(key) or any(tier.has(key) for tier in self._further)

    def _size(self, keys: Sequence[Key]) -> int:
        snapshots = sum(key[0] == SNAPSHOT for key in keys)
        return snapshots * self._bytes.get(SNAPSHOTS, 0) + (len(keys) - snapshots) * self._bytes.get(BLOCKS, 0)

    def _begin(self, state: RequestState, found: Wanted) -> bool:
        """Bring what a beginning needs one tier nearer; False where computing it is faster, or there is no room."""
        id, keys = state.request.id, [*found.blocks, *found.snapshots]
        tokens = found.num_tokens - found.hit.num_tokens
        near = [key for key in keys if self._host(key).find(key) >= 0]
        far = dict[str, list[Key]]()
        for key in keys if len(near) < len(keys) else ():
            if self._host(key).find(key) < 0:
                far.setdefault(next(t.name for t in self._further if t.has(key)), []).append(key)
        nbytes = {HOST: self._size(keys), **{name: self._size(of) for name, of in far.items()}}
        if state.request.id not in self.wanted_anyway and not self._rates.worth(tokens, nbytes):
            return False
        if not far:
            return self._promote(state, found)
        # Not all of it may fit in host memory: what a fetch has brought goes on before the next one takes its place.
        if id not in self._has_had and self._fetch(state, near, far, tokens / len(keys)):
            return True
        nearer = wanted(self._cache, state, lambda key: self._host(key).find(key) >= 0)
        if nearer is None:
            return self._fetch(state, near, far, tokens / len(keys))
        return not self._is_brought(id, nearer) and self._promote(state, nearer)

    # To the device

    def _promote(self, state: RequestState, found: Wanted) -> bool:
        cache, tokens = self._cache, found.num_tokens - found.hit.num_tokens
        free = sum(1 for block in found.held if not cache.pool.references[block])
        if len(found.blocks) + free > cache.pool.free_blocks:  # of a window, the hit's blocks are other ones
            return False
        with self._for_loads():
            snapshots = {key: cache.states.pools[0].reserve(evict=True) for key in found.snapshots}
            if -1 in snapshots.values():
                return False
            for block in found.held:
                cache.pool.hold(block)
            if found.snapshot >= 0:
                cache.states.pools[0].hold(found.snapshot)
            blocks = dict(zip(found.blocks, cache.pool.allocate_all(len(found.blocks)), strict=True))
        promotion = Promotion(state, tokens, found.held, found.snapshot, blocks, snapshots)
        for kind, keys in promotion.keys.items():
            host = self._pools[kind].host
            for key in keys:
                host.use(key)
            host.pin(keys)
            self._on_way.update(keys)
        self._begun.append(promotion)
        self._promoted.add(state.request.id)
        self._let_go(state.request.id)
        return True

    @contextlib.contextmanager
    def _for_loads(self) -> Iterator[None]:
        """Places that are given out meanwhile are written by copies from host memory."""
        for pool in self._pools.values():
            pool.for_loads = True
        try:
            yield
        finally:
            for pool in self._pools.values():
                pool.for_loads = False

    def start(self, ticket: int) -> dict[str, Pairs]:
        """(entry, place) of each kind that the next copy, which gets this ticket, brings to the device; nothing where
        none is to be started."""
        if not self._begun:
            return {}
        promotion = self._begun.pop(0)
        self._copied[ticket] = promotion
        found = {}
        for kind, places in promotion.keys.items():
            find = self._pools[kind].host.find
            found[kind] = [(find(key), place) for key, place in places.items()]
        return found

    def ended(self, ticket: int, seconds: float) -> None:
        """A copy has ended on every rank."""
        promotion, cache = self._copied.pop(ticket), self._cache
        for key, block in promotion.blocks.items():
            cache.pool.store(block, *key)
        for (_, digest), snapshot in promotion.snapshots.items():
            cache.states.pools[0].store(snapshot, digest, shared=False)
            cache.states.release(snapshot)
        cache.pool.release(reversed([*promotion.held, *promotion.blocks.values()]))
        cache.states.release(promotion.snapshot)
        nbytes = 0
        for kind, keys in promotion.keys.items():
            self._pools[kind].host.unpin(keys)
            self._on_way.difference_update(keys)
            nbytes += len(keys) * self._bytes[kind]
        self._promoted.discard(promotion.state.request.id)
        self._rates.copied(HOST, nbytes, seconds)
        self.copied[HOST] += nbytes
        self.hits[HOST] += promotion.tokens

    # To host memory

    def _fetch(self, state: RequestState, near: Sequence[Key], far: Mapping[str, list[Key]], tokens: float) -> bool:
        """Bring keys from far to host memory, which keeps the near ones."""
        entries: dict[str, list[tuple[Key, int]]] = {}
        for key in near:
            self._host(key).pin([key])
        for name, keys in far.items():
            for key in keys:
                entry = self._host(key).expect(key)
                if entry < 0:  # what is there by then is enough for a shorter beginning
                    break
                entries.setdefault(name, []).append((key, entry))
                self._tokens[key], self._fetcher[key] = tokens, state.request.id
        for key in near:
            self._host(key).unpin([key])
        if not entries:
            return False
        self._has_had.add(state.request.id)
        self._since.setdefault(state.request.id, self.clock())
        self._fetched[state.request.id] = {key for of in entries.values() for key, _ in of}
        for tier in self._further:
            if of := entries.get(tier.name):
                tier.fetch(of)
        return True

    def fetched(self, tier: str, keys: Mapping[Key, bool], seconds: float) -> None:
        """Entries of host memory were filled, or, where False, could not be."""
        for key, filled in keys.items():
            host, tokens = self._host(key), self._tokens.pop(key)
            (host.arrived if filled else host.failed)(key)
            self.hits[tier] += tokens * filled
            if (id := self._fetcher.pop(key)) in self._has_had and host.find(key) >= 0:
                host.pin([key])  # else what others have fetched or computed takes its place before there are blocks
                self._kept.setdefault(id, []).append(key)
        for id, awaited in list(self._fetched.items()):
            awaited.difference_update(keys)
            if not awaited:
                del self._fetched[id]
        nbytes = self._size([key for key, filled in keys.items() if filled])
        self._rates.copied(tier, nbytes, seconds)
        self.copied[tier] += nbytes
