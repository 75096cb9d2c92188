"""Promotions: what waiting requests have brought to the device from the tiers, before they may join a step.

While a promotion runs, its blocks are nobody else's, its copies in host memory stay, and the request waits; others pass
it. Then its blocks are ordinary cached ones, which the request finds as it finds any. What lies further away than host
memory comes there first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.resource import Resource
from graphllm.engine.tiers.further_tier import FurtherTier
from graphllm.engine.tiers.host_cache import HostCache
from graphllm.engine.tiers.rates import Rates
from graphllm.engine.tiers.tier_pool import BLOCKS, SNAPSHOTS, Pairs, TierPool
from graphllm.engine.tiers.wanted import SNAPSHOT, Wanted, wanted

HOST = "host"
_LOOKS = 16  # how often a request that finds nothing asks before it looks again
_MOST = 3  # promotions and fetches of a request before it joins: what comes may be lost again


@dataclass(frozen=True)
class Promotion:
    """What one request has brought to the device.

    state: the request's.
    tokens: that need not be computed then, in addition to the ones that the device has.
    held: blocks that the device has of its beginning, kept until the end.
    snapshot: that it has there, kept as well; -1 for none.
    blocks, snapshots: by the key of what they get, in the order of the sequence.
    nbytes: that are copied, of all ranks together.
    """

    state: RequestState
    tokens: int
    held: list[int]
    snapshot: int
    blocks: dict[Key, int]
    snapshots: dict[Key, int]
    nbytes: int


class Promotions(Resource):
    """pools: of blocks, and of snapshots if there are any, by kind.

    entry_bytes: of an entry of each kind, of all ranks together.
    further: tiers beyond host memory, the nearest first.
    hits: tokens that came from each tier instead of being computed. What came from further away counts for the host,
        too.
    copied: bytes that came from each tier.
    wanted_anyway: requests for which contents are brought also where computing them would be faster.
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
        self._tokens = dict[Key, float]()  # of these keys: a share of what the request need not compute
        self._promoted = set[str]()  # requests with a promotion that runs
        self._on_way = set[Key]()  # to the device
        self._had = Counter[str]()  # promotions and fetches of each waiting request
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
        if id in self._promoted or id in self._fetched:
            return False
        if self._had[id] >= _MOST or self._looked.get(id, 0):
            self._looked[id] = max(0, self._looked.get(id, 0) - 1)
            return True
        found = wanted(self._cache, state, self._has)
        if found is None:
            self._looked[id] = _LOOKS
            return True
        keys = [*found.blocks, *found.snapshots]
        if any(key in self._on_way or self._host(key).is_coming(key) for key in keys):
            return False  # another request has it brought
        if not self._cache.fits(state.num_tokens, found.hit):
            return True  # it waits for blocks first
        return not self._begin(state, found, keys)

    def release(self, state: RequestState, joined: bool) -> None:
        if joined:
            self.forget(state.request.id)

    def forget(self, id: str) -> None:
        """A request has ended. What it has had brought comes all the same."""
        del self._had[id]
        self._looked.pop(id, None)

    def _host(self, key: Key) -> HostCache:
        return self._pools[SNAPSHOTS if key[0] == SNAPSHOT else BLOCKS].host

    def _has(self, key: Key) -> bool:
        host = self._host(key)
        return host.find(key) >= 0 or host.is_coming(key) or any(tier.has(key) for tier in self._further)

    def _size(self, keys: Iterable[Key]) -> int:
        return sum(self._bytes[SNAPSHOTS if key[0] == SNAPSHOT else BLOCKS] for key in keys)

    def _begin(self, state: RequestState, found: Wanted, keys: list[Key]) -> bool:
        """Bring what a beginning needs one tier nearer; False where computing it is faster, or there is no room."""
        tokens = found.num_tokens - found.hit.num_tokens
        far: dict[str, list[Key]] = {}
        for key in keys:
            if self._host(key).find(key) < 0:
                far.setdefault(next(t.name for t in self._further if t.has(key)), []).append(key)
        nbytes = {HOST: self._size(keys), **{name: self._size(of) for name, of in far.items()}}
        if state.request.id not in self.wanted_anyway and not self._rates.worth(tokens, nbytes):
            return False
        self._had[state.request.id] += 1
        return self._fetch(state, far, tokens / len(keys)) if far else self._promote(state, found, tokens, nbytes[HOST])

    # To the device

    def _promote(self, state: RequestState, found: Wanted, tokens: int, nbytes: int) -> bool:
        cache = self._cache
        snapshots = {key: cache.states.pools[0].reserve(evict=True) for key in found.snapshots}
        if -1 in snapshots.values():
            return False
        for block in found.held:
            cache.pool.hold(block)
        if found.snapshot >= 0:
            cache.states.pools[0].hold(found.snapshot)
        blocks = dict(zip(found.blocks, cache.pool.allocate_all(len(found.blocks)), strict=True))
        promotion = Promotion(state, tokens, found.held, found.snapshot, blocks, snapshots, nbytes)
        for key in (*blocks, *snapshots):
            self._host(key).use(key)
            self._host(key).pin([key])
            self._on_way.add(key)
        self._begun.append(promotion)
        self._promoted.add(state.request.id)
        return True

    def start(self, ticket: int) -> dict[str, Pairs]:
        """(entry, place) of each kind that the next copy, which gets this ticket, brings to the device; nothing where
        none is to be started."""
        if not self._begun:
            return {}
        promotion = self._begun.pop(0)
        self._copied[ticket] = promotion
        places = {BLOCKS: promotion.blocks, SNAPSHOTS: promotion.snapshots}
        return {
            kind: [(self._pools[kind].host.find(key), place) for key, place in of.items()]
            for kind, of in places.items()
            if of
        }

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
        for key in (*promotion.blocks, *promotion.snapshots):
            self._host(key).unpin([key])
            self._on_way.discard(key)
        self._promoted.discard(promotion.state.request.id)
        self._rates.copied(HOST, promotion.nbytes, seconds)
        self.copied[HOST] += promotion.nbytes
        self.hits[HOST] += promotion.tokens

    # To host memory

    def _fetch(self, state: RequestState, far: Mapping[str, list[Key]], tokens: float) -> bool:
        entries: dict[str, list[tuple[Key, int]]] = {}
        for name, keys in far.items():
            for key in keys:
                entry = self._host(key).expect(key)
                if entry < 0:  # what is there by then is enough for a shorter beginning
                    break
                entries.setdefault(name, []).append((key, entry))
                self._tokens[key] = tokens
        if not entries:
            return False
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
        for id, awaited in list(self._fetched.items()):
            awaited.difference_update(keys)
            if not awaited:
                del self._fetched[id]
        nbytes = self._size(key for key, filled in keys.items() if filled)
        self._rates.copied(tier, nbytes, seconds)
        self.copied[tier] += nbytes
