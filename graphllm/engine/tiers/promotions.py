"""Promotions: what waiting requests have brought to the device from the tiers, before they may join a step.

While a promotion runs, its blocks are nobody else's, its copies in host memory stay, and the request waits; others pass
it. Then its blocks are ordinary cached ones, which the request finds as it finds any. What lies further away than host
memory comes there first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass
class _Waiting:
    """What is known of a request that asked.

    had: promotions and fetches since it came further.
    reach: tokens that the device had of it at most.
    has_fetched: it had a fetch whose contents have not been promoted.
    kept: what was fetched for it, pinned until it is on its way.
    awaited: what comes for another request.
    since: when it began to wait; None: it does not.
    looks: how often it may ask before it looks again, because it found nothing.
    """

    had: int = 0
    reach: int = 0
    has_fetched: bool = False
    kept: list[Key] = field(default_factory=list)
    awaited: Key | None = None
    since: float | None = None
    looks: int = 0


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
        self._fetched = dict[str, set[Key]]()  # by request, which may have ended: keys that come from further away
        self._fetcher = dict[Key, str]()  # of these keys: the request
        self._tokens = dict[Key, float]()  # of these keys: a share of what the request need not compute
        self._promoted = set[str]()  # requests with a promotion that runs, which may have ended
        self._on_way = set[Key]()  # to the device
        self._waiting = dict[str, _Waiting]()  # by request
        self.clock = time.monotonic

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
        known = self._waiting.setdefault(id, _Waiting())
        if known.since is not None and self.clock() > known.since + _PATIENCE:
            return True
        if id in self._fetched or self._comes(known.awaited):
            return False
        known.awaited = None
        if known.had >= _MOST or known.looks:
            known.looks = max(0, known.looks - 1)
            return True
        found = wanted(self._cache, state, self._has)
        if found is None:
            known.looks = _LOOKS
            return True
        if self._is_brought(known, found):
            return False
        if not self._cache.fits(state.num_tokens, found.hit):
            return True  # it waits for blocks first
        if found.snapshots and not self._cache.states.pools[0].pool.free_blocks:
            self._waits(known)
            return False  # steps and copies in flight hold them all
        if found.hit.num_tokens > known.reach:
            known.reach, known.had = found.hit.num_tokens, 0
        begun = self._begin(state, known, found)
        known.had += begun
        return not (begun or known.awaited is not None)

    def _waits(self, known: _Waiting) -> None:
        if known.since is None:
            known.since = self.clock()

    def _is_brought(self, known: _Waiting, found: Wanted) -> bool:
        """Whether another request has some of it brought; then this one waits for that."""
        if not self._on_way and not any(pool.host.any_coming for pool in self._pools.values()):
            return False
        key = next((key for key in (*found.blocks, *found.snapshots) if self._comes(key)), None)
        if key is not None:
            known.awaited = key
            self._waits(known)
        return key is not None

    def _comes(self, key: Key | None) -> bool:
        return key is not None and (key in self._on_way or self._host(key).is_coming(key))

    def release(self, state: RequestState, joined: bool) -> None:
        if joined:
            self.forget(state.request.id)

    def forget(self, id: str) -> None:
        """A request has ended. What it has had brought comes all the same."""
        self._let_go(id)
        self._waiting.pop(id, None)

    def place(self, state: RequestState, table: RequestTable) -> None:
        self._let_go(state.request.id)

    def _let_go(self, id: str) -> None:
        """What was fetched for a request is as any other copy."""
        if (known := self._waiting.get(id)) is None:
            return
        kept, known.kept, known.has_fetched = known.kept, [], False
        for key in kept:
            self._host(key).unpin([key])

    def _host(self, key: Key) -> HostCache:
        return self._pools[kind_of(key)].host

    def _has(self, key: Key) -> bool:
        host = self._host(key)
        return host.find(key) >= 0 or host.is_coming(key) or any(tier.has(key) for tier in self._further)

    def _size(self, keys: Sequence[Key]) -> int:
        snapshots = sum(key[0] == SNAPSHOT for key in keys)
        return snapshots * self._bytes.get(SNAPSHOTS, 0) + (len(keys) - snapshots) * self._bytes.get(BLOCKS, 0)

    def _begin(self, state: RequestState, known: _Waiting, found: Wanted) -> bool:
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
        if not known.has_fetched and self._fetch(id, known, near, far, tokens / len(keys)):
            return True
        nearer = wanted(self._cache, state, lambda key: self._host(key).find(key) >= 0)
        if nearer is None:
            return self._fetch(id, known, near, far, tokens / len(keys))
        return not self._is_brought(known, nearer) and self._promote(state, nearer)

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

    def _fetch(
        self, id: str, known: _Waiting, near: Sequence[Key], far: Mapping[str, list[Key]], tokens: float
    ) -> bool:
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
                self._tokens[key], self._fetcher[key] = tokens, id
        for key in near:
            self._host(key).unpin([key])
        if not entries:
            return False
        known.has_fetched = True
        self._waits(known)
        self._fetched[id] = {key for of in entries.values() for key, _ in of}
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
            known = self._waiting.get(self._fetcher.pop(key))
            if known is not None and known.has_fetched and host.find(key) >= 0:
                host.pin([key])  # else what others have fetched or computed takes its place before there are blocks
                known.kept.append(key)
        for id, awaited in list(self._fetched.items()):
            awaited.difference_update(keys)
            if not awaited:
                del self._fetched[id]
        nbytes = self._size([key for key, filled in keys.items() if filled])
        self._rates.copied(tier, nbytes, seconds)
        self.copied[tier] += nbytes
