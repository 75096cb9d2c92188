"""Copies in host memory: whatever is stored, pinned, expected and forgotten, no entry is lost or given twice; and what
each policy lets go."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.tiers.host_cache import HostCache
from graphllm.engine.tiers.policies import ARC, LRU, POLICIES
from graphllm.engine.tiers.rates import Rates
from tests.tiers import draws


def key(number: int) -> Key:
    return 0, number.to_bytes(4, "big")


class HostCacheMachine(RuleBasedStateMachine):
    """Beside a dictionary of what each entry was last given for."""

    @initialize(entries=st.integers(1, 8), policy=st.sampled_from(["lru", "arc"]))
    def start(self, entries: int, policy: str) -> None:
        self.host = HostCache(entries, policy)
        self.host.ready(entries // 2)
        self.content: dict[int, Key] = {}
        self.coming: dict[Key, int] = {}
        self.pins: list[tuple[Key, int]] = []  # and the entries, which are nobody else's until then

    @rule(numbers=st.lists(st.integers(0, 12), max_size=6))
    def store(self, numbers: list[int]) -> None:
        pinned = {entry for _, entry in self.pins}
        found = self.host.store(map(key, numbers))
        assert len({entry for _, entry in found}) == len(found)
        for k, entry in found:
            assert entry not in self.coming.values()
            assert entry not in pinned
            self.content[entry] = k

    @rule()
    def become_ready(self) -> None:
        self.host.ready(self.host.num_entries)
        assert self.host.is_ready

    @rule(number=st.integers(0, 12))
    def expect(self, number: int) -> None:
        k = key(number)
        if self.host.find(k) >= 0 or k in self.coming:
            return
        entry = self.host.expect(k)
        if entry >= 0:
            assert entry not in {pinned for _, pinned in self.pins}
            self.content.pop(entry, None)
            self.coming[k] = entry
            assert self.host.is_coming(k)
            assert self.host.find(k) < 0

    @precondition(lambda self: self.coming)
    @rule(filled=st.booleans())
    def end(self, filled: bool) -> None:
        k, entry = self.coming.popitem()
        wanted = self.host.is_coming(k)
        if filled:
            self.host.arrived(k)
            self.content[entry] = k
        else:
            self.host.failed(k)
        assert (self.host.find(k) == entry) == (filled and wanted)

    @rule(number=st.integers(0, 12), used=st.booleans())
    def pin(self, number: int, used: bool) -> None:
        if (entry := self.host.find(k := key(number))) >= 0:
            self.host.pin([k])
            self.pins.append((k, entry))
            if used:
                self.host.use(k)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.host.unpin([self.pins.pop(0)[0]])

    @rule()
    def clear(self) -> None:
        self.host.clear()
        assert len(self.host) == 0

    @invariant()
    def entries(self) -> None:
        if not hasattr(self, "host"):
            return
        found = {k: self.host.find(k) for k in map(key, range(13))}
        used = [entry for entry in found.values() if entry >= 0]
        assert len(used) == len(set(used)) == len(self.host)
        assert len(used) + len(self.coming) <= self.host.num_entries
        assert all(self.content[entry] == k for k, entry in found.items() if entry >= 0)
        assert self.host.pinned == len({k for k, _ in self.pins})

    def teardown(self) -> None:
        """No entry is lost."""
        if not hasattr(self, "host"):
            return
        self.host.ready(self.host.num_entries)
        for k in list(self.coming):
            self.host.failed(k)
        self.host.unpin(k for k, _ in self.pins)
        self.host.clear()
        assert len(self.host.store(map(key, range(100, 120)))) == self.host.num_entries


TestHostCache = HostCacheMachine.TestCase
TestHostCache.settings = settings(
    max_examples=draws(30, 300), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def _hits(policy: str, accesses: list[int], entries: int = 8) -> int:
    host, hits = HostCache(entries, policy), 0
    host.ready(entries)
    for number in accesses:
        if host.find(key(number)) >= 0:
            host.use(key(number))
            hits += 1
        else:
            host.store([key(number)])
    return hits


def test_lru_is_in_the_order_of_use() -> None:
    """What is pinned when its turn comes is in use."""
    policy, order = LRU(4), OrderedDict[Key, None]()
    for number in (1, 2, 3, 4):
        policy.add(key(number))
        order[key(number)] = None
    policy.use(key(1))
    assert [policy.evict({key(2)}), policy.evict(()), policy.evict(()), policy.evict({key(2)})] == [
        key(3), key(4), key(1), None,
    ]  # fmt: skip


def test_arc_keeps_what_is_used_often_when_much_passes_once() -> None:
    often = [1, 2, 3, 4] * 3
    passing = [number for start in range(100, 400, 12) for number in (*range(start, start + 12), 1, 2, 3, 4)]
    assert _hits("lru", often + passing) == 8
    assert _hits("arc", often + passing) == 8 + 4 * 25


def test_arc_follows_recency_when_that_is_what_comes_back() -> None:
    policy = ARC(4)
    for number in range(4):
        policy.add(key(number))
    policy.use(key(0))
    policy.use(key(1))
    assert policy.evict(()) == key(2)  # recent ones go first, while the target is 0
    policy.add(key(4))
    assert policy.evict(()) == key(3)
    policy.add(key(2))  # it went lately
    assert policy.target == 1
    assert list(policy.frequent) == [key(0), key(1), key(2)]
    assert policy.evict(()) == key(0)  # there are no more recent ones than the target


@pytest.mark.parametrize(("tokens", "seconds", "worth"), [(1000, 0.5, True), (1000, 0.001, False)])
def test_rates(tokens: int, seconds: float, worth: bool) -> None:
    """Prompts of 1,000 tokens take so long, copies of a gigabyte 0.1 seconds."""
    rates = Rates()
    assert rates.worth(tokens, {"host": 10**9})  # nothing is known
    rates.computed(tokens, seconds)
    rates.computed(1, 10.0)  # of a step that decodes
    rates.copied("host", 10**9, 0.1)
    assert rates.worth(tokens, {"host": 10**9}) == worth
    assert rates.worth(tokens, {"host": 10**9, "disk": 1})  # a tier of which nothing is known
    if not worth:  # at times it is tried again
        assert 1 <= sum(rates.worth(tokens, {"host": 10**9}) for _ in range(100)) <= 2


class Pinned(set[Key]):
    """looks: how often it was asked for a key."""

    looks = 0

    def __contains__(self, found: object) -> bool:
        self.looks += 1
        return super().__contains__(found)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_many_pinned_copies_are_not_looked_at_for_each_one_that_goes(policy: str) -> None:
    order = POLICIES[policy](1000)
    for number in range(1000):
        order.add(key(number))
    pinned = Pinned(map(key, range(500)))
    gone = {order.evict(pinned) for _ in range(500)}
    assert gone == set(map(key, range(500, 1000)))
    assert pinned.looks <= 1000
    assert order.evict(pinned) is None
    pinned.clear()
    assert order.evict(pinned) is not None
