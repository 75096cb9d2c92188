"""BlockPool against a naive model, and what its digests depend on."""

from __future__ import annotations

import hashlib
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.cache.block_pool import BlockPool
from graphllm.engine.cache.digests import PrefixHasher
from graphllm.engine.requests.request import Adapter, EngineRequest, Item
from tests.tiers import draws


class PoolMachine(RuleBasedStateMachine):
    """The model: holders of each page, contents of each page, and when a page was last let go."""

    @initialize(pages=st.integers(1, 9))
    def start(self, pages: int) -> None:
        self.pool = BlockPool(pages, True)
        self.pages = range(1, pages)
        self.holders = dict.fromkeys(self.pages, 0)
        self.content: dict[int, tuple[int, bytes]] = {}
        self.let_go = dict.fromkeys(self.pages, 0)
        self.time = 0

    def _held(self) -> list[int]:
        return [p for p in self.pages if self.holders[p]]

    def _free(self) -> list[int]:
        return [p for p in self.pages if not self.holders[p]]

    @rule()
    def allocate(self) -> None:
        """Pages that nobody can find go first, then the one that was let go longest ago."""
        free = self._free()
        if not free:
            with pytest.raises(KeyError):
                self.pool.allocate()
            return
        page = self.pool.allocate()
        empty = [p for p in free if p not in self.content]
        assert page in (empty or [min(free, key=lambda p: self.let_go[p])])
        self.holders[page] = 1
        self.content.pop(page, None)

    @precondition(lambda self: self._held() or self.content)
    @rule(number=st.integers(0, 99))
    def hold(self, number: int) -> None:
        """A page that is held or can be found gets one more holder."""
        pages = sorted({*self._held(), *self.content})
        page = pages[number % len(pages)]
        self.pool.hold(page)
        self.holders[page] += 1

    @precondition(lambda self: self._held())
    @rule(numbers=st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True))
    def release(self, numbers: list[int]) -> None:
        held = self._held()
        pages = list(dict.fromkeys(held[n % len(held)] for n in numbers))
        self.pool.release(iter(pages))
        for page in pages:
            self.holders[page] -= 1
            self.time += 1
            self.let_go[page] = self.time

    @precondition(lambda self: self._held())
    @rule(number=st.integers(0, 99), group=st.integers(0, 1), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def store(self, number: int, group: int, digest: bytes) -> None:
        """The first page of a content is the one; a page keeps its first content."""
        held = self._held()
        page = held[number % len(held)]
        self.pool.store(page, group, digest)
        if page not in self.content and (group, digest) not in self.content.values():
            self.content[page] = (group, digest)

    @rule()
    def reset_cache(self) -> None:
        idle = not self._held()
        assert self.pool.reset_cache() == idle
        if idle:
            self.content.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.references == [0, *self.holders.values()]
        assert self.pool.free_blocks == len(self._free())
        found = {key: page for page, key in self.content.items()}
        for group in range(2):
            for digest in (b"a", b"b", b"c", b"d"):
                assert self.pool.find(group, digest) == found.get((group, digest), 0)
        for page in self.pages:
            assert self.pool.exclusive(page) == (self.holders[page] == 1 and page not in self.content)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=draws(20, 60), stateful_step_count=40, deadline=None)


def test_the_last_page_of_a_sequence_goes_first() -> None:
    """Released last page first, a beginning survives longest."""
    pool = BlockPool(4, True)
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.store(page, 0, bytes([page]))
    pool.release(reversed(pages))
    assert [pool.allocate() for _ in range(3)] == pages[::-1]


def test_a_page_in_use_is_not_the_oldest() -> None:
    pool = BlockPool(3, True)
    first, second = pool.allocate(), pool.allocate()
    pool.store(first, 0, b"1")
    pool.store(second, 0, b"2")
    pool.release([first, second])
    pool.hold(first)
    pool.release([first])
    assert pool.allocate() == second
    assert pool.find(0, b"1") == first
    assert pool.find(0, b"2") == 0


def test_a_duplicate_takes_over_when_the_first_is_gone() -> None:
    pool = BlockPool(3, True)
    first, second = pool.allocate(), pool.allocate()
    pool.store(first, 0, b"x")
    pool.store(second, 0, b"x")
    assert pool.find(0, b"x") == first
    pool.release([first])
    assert pool.allocate() == first
    assert pool.find(0, b"x") == 0
    pool.store(second, 0, b"x")
    assert pool.find(0, b"x") == second


def _digests(hasher: PrefixHasher, tokens: list[int], **fields: Any) -> list[bytes]:
    """Of a prompt, computed in one go and block by block."""
    request = EngineRequest(id="", prompt=tokens, params=SamplingParams(), stop_ids=[], limit=1, seed=0, **fields)
    once: list[bytes] = []
    hasher.extend(request, once, tokens)
    chain: list[bytes] = []
    for at in range(0, len(tokens), hasher.block_size):
        hasher.extend(request, chain, tokens[at : at + hasher.block_size])
    assert once == chain
    return chain


def test_digests_tell_apart_everything_that_blocks_depend_on() -> None:
    """Tokens, their order, all tokens before, salt, adapter, items and where they stand, block size, secret; nothing
    else."""
    one, same, other = PrefixHasher(2, "secret"), PrefixHasher(2, "secret"), PrefixHasher(2, "Secret")
    tokens = [1, 2, 3, 4]

    def item(content: str, position: int) -> dict[str, list[Item]]:
        return {"items": [Item(content_hash=content, position=position, length=1)]}

    digests = [
        *_digests(one, tokens), *_digests(one, tokens, cache_salt="salt"), *_digests(one, [2, 1]),
        *_digests(one, [3, 4]), *_digests(one, [1, 2], cache_salt="other"), *_digests(one, [1, 5, 3, 4]),
        *_digests(PrefixHasher(4, "secret"), tokens), *_digests(PrefixHasher(2, "secret", [("full", 0, 2)]), tokens),
        *_digests(other, tokens), *_digests(other, tokens, cache_salt="salt"), *_digests(one, [1, 2 << 8]),
        *_digests(one, tokens, adapter=Adapter("a", "", "1")), *_digests(one, tokens, adapter=Adapter("a", "", "2")),
        *_digests(one, tokens, cache_salt="x"),
        *_digests(one, tokens, **item("a", -1)), *_digests(one, tokens, **item("b", -1)),
        *_digests(one, tokens, **item("a", 0)), *_digests(one, tokens, **item("a", 1)),
        *_digests(one, tokens, **item("b", 1)), _digests(one, tokens, **item("a", 2))[1],
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert _digests(same, tokens) == _digests(one, tokens)
    assert _digests(one, tokens, **item("a", 2))[0] == _digests(one, tokens)[0]
    named = [_digests(one, tokens, adapter=Adapter(name, folder, "x")) for name, folder in (("a", "b"), ("c", "d"))]
    assert named[0] == named[1]
    assert all(len(d) >= 32 for d in digests)


def test_digests_cannot_be_computed_without_the_secret() -> None:
    """Two hashers that were given none differ, and neither is a plain hash of what everybody knows."""
    one, two = PrefixHasher(2), PrefixHasher(2)
    first = _digests(one, [1, 2])[0]
    assert first != _digests(two, [1, 2])[0]
    ids = np.array([1, 2], dtype=np.int32).tobytes()
    assert first not in {hashlib.sha256(before + ids).digest() for before in (b"", hashlib.sha256(b"").digest())}
