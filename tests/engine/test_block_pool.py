"""BlockPool against a naive model, and what its digests depend on."""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphllm.engine.pool import BlockPool


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
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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


def _ids(*ids: int) -> bytes:
    return np.array(ids, dtype=np.int32).tobytes()


def test_digests_tell_apart_everything_that_pages_depend_on() -> None:
    """Tokens, their order, all tokens before, the salt, the secret; nothing else."""
    pool, same, other = BlockPool(2, True, b"secret"), BlockPool(9, True, b"secret"), BlockPool(2, True, b"Secret")
    first = pool.digest(b"", _ids(1, 2))
    second = pool.digest(first, _ids(3, 4))
    salted = pool.digest(b"", _ids(1, 2), "salt")
    digests = [
        first, second, salted, pool.digest(salted, _ids(3, 4)), pool.digest(b"", _ids(2, 1)),
        pool.digest(b"", _ids(3, 4)), pool.digest(b"", _ids(1, 2), "other"), pool.digest(b"", _ids(1, 2, 3, 4)),
        pool.digest(pool.digest(b"", _ids(1, 5)), _ids(3, 4)), other.digest(b"", _ids(1, 2)),
        other.digest(b"", _ids(1, 2), "salt"), pool.digest(b"", _ids(1, 2 << 8)),
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert same.digest(same.digest(b"", _ids(1, 2)), _ids(3, 4)) == second
    assert all(len(d) >= 32 for d in digests)


def test_digests_cannot_be_computed_without_the_secret() -> None:
    """Two pools that were given none differ, and neither is a plain hash of what everybody knows."""
    one, two = BlockPool(2, True), BlockPool(2, True)
    assert one.digest(b"", _ids(1, 2)) != two.digest(b"", _ids(1, 2))
    assert one.digest(b"", _ids(1, 2)) not in {
        hashlib.sha256(before + _ids(1, 2)).digest() for before in (b"", hashlib.sha256(b"").digest())
    }
