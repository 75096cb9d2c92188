"""What the beginning of a sequence needs that is not on the device, and lies in a tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.cache.hits import Hit, Retained, cached
from graphllm.engine.requests.request_table import RequestState

SNAPSHOT = -1  # the group in keys of snapshots
_IN_A_TIER = -1  # in the place of a block: it is there, but not on the device
_AT_ONCE = 64  # digests of one look-up, where the one before may have been the last


class Wanted(NamedTuple):
    """A beginning of ``num_tokens`` tokens.

    hit: what the device gives without any tier.
    held: blocks that the device has of the beginning.
    snapshot: that it has at the end, -1 for none.
    blocks, snapshots: keys of the rest, in the order of the sequence.
    """

    num_tokens: int
    hit: Hit
    held: list[int]
    snapshot: int
    blocks: list[Key]
    snapshots: list[Key]


class _Everywhere:
    """A retention whose entries may be in a tier, too. has: whether a key is in one."""

    def __init__(self, retained: Retained, number: int, has: Callable[[Key], bool]) -> None:
        self._retained, self._number, self._has = retained, number, has
        self.unit = retained.unit

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """As the retention's, with -1 for entries in a tier."""
        found, at = self._retained.find(digests), 0
        while at < len(found):
            if not found[at] and self._has((self._number, digests[at])):
                found[at] = _IN_A_TIER
            if found[at] and at == len(found) - 1:  # a list may end at its first missing entry
                found += self._retained.find(digests[at + 1 : at + 1 + _AT_ONCE])
            at += 1
        return found

    def usable(self, found: Sequence[int], num_tokens: int) -> int:
        return self._retained.usable(found, num_tokens)


def keys_of(cache: CacheManager, state: RequestState, num_tokens: int) -> list[Key]:
    """Of all that a beginning of so many tokens is made of, in the order of the sequence within each group; of
    recurrent states, the snapshot at its end."""
    size, digests, found = cache.block_size, state.digests, list[Key]()
    for group in cache.groups:
        each = group.unit // size
        found += [(group.number, digest) for digest in digests[each - 1 : num_tokens // size : each]]
    if num_tokens >= size:
        found += [(SNAPSHOT, digests[num_tokens // size - 1]) for _ in cache.states.pools]
    return found


def wanted(cache: CacheManager, state: RequestState, has: Callable[[Key], bool]) -> Wanted | None:
    """What tiers can give a waiting request in addition to the device; None for nothing. has: whether a key is in a
    tier."""
    if not cache.reads(state):
        return None
    hit = cache.lookup(state)
    end = (state.num_tokens - 1) // cache.boundary * cache.boundary
    size, digests = cache.block_size, state.digests
    if hit.num_tokens >= end:
        return None
    numbers = [*(group.number for group in cache.groups), *(SNAPSHOT for _ in cache.states.pools)]
    everywhere = [_Everywhere(r, n, has) for r, n in zip(cache.retentions, numbers, strict=True)]
    reach, found = cached(everywhere, digests, end, size, cache.boundary)
    if reach <= hit.num_tokens:
        return None
    held, missing = list[int](), list[tuple[int, Key]]()
    for group, entries in zip(cache.groups, found, strict=False):
        each = group.unit // size
        for i in range(group.first_seen(reach), reach // group.unit):
            if entries[i] == _IN_A_TIER:
                missing.append((i * each, (group.number, digests[(i + 1) * each - 1])))
            else:
                held.append(entries[i])
    last = [entries[reach // cache.boundary - 1] for entries in found[len(cache.groups) :]]
    snapshots = [(SNAPSHOT, digests[reach // size - 1]) for entry in last if entry == _IN_A_TIER]
    snapshot = next((entry - 1 for entry in last if entry > 0), -1)
    missing.sort(key=lambda one: one[0])  # of all groups: where not all find room, what does is a beginning
    return Wanted(reach, hit, held, snapshot, [key for _, key in missing], snapshots)
