"""Host memory is prepared as it is needed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from graphllm.engine.cache.block_pool import BlockPool
from graphllm.engine.tiers import preparing
from graphllm.engine.tiers.host_cache import HostCache
from graphllm.engine.tiers.preparing import Preparing
from graphllm.engine.tiers.tier_pool import BLOCKS, SNAPSHOTS, TierPool
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.tiers import PrepareEntries, ReadyEntries

ENTRIES, AHEAD, RESERVE = 60, 4, 10


class Two:
    """Two ranks, the second of which is later. asked: entries, each time. looks: until what was asked for is there.
    late: entries that the second has less."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.looks, self.late = 0, 1

    def do(self, command: Command) -> None:
        assert isinstance(command, PrepareEntries)
        self.asked.append(command.entries[BLOCKS])

    def ask(self, query: Query) -> list[Answered]:
        assert isinstance(query, ReadyEntries)
        count = self.asked[-1] if self.asked and not self.looks else 0
        self.looks = max(0, self.looks - 1)
        return [Answered({BLOCKS: count}), Answered({BLOCKS: max(0, count - self.late)})]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Two:
    monkeypatch.setattr(preparing, "_RESERVE", RESERVE * 100)
    monkeypatch.setattr(preparing, "_AGAIN", 0.0)
    return Two()


def made(ranks: Two) -> tuple[BlockPool, TierPool, Preparing]:
    pool = BlockPool(17, True)
    tiered = TierPool(BLOCKS, pool, HostCache(ENTRIES), lambda ticket: None, AHEAD)
    pools: Mapping[str, TierPool] = {BLOCKS: tiered}
    return pool, tiered, Preparing(ranks, pools, {BLOCKS: 100})


def fill(pool: BlockPool, tiered: TierPool, first: int, count: int) -> None:
    """Blocks are computed, and released."""
    for number in range(first, first + count):
        block = pool.allocate()
        pool.store(block, 0, number.to_bytes(4, "little"))
        pool.release([block])
        tiered.rescues()
        tiered.copies(100)


def test_nothing_is_taken_while_the_device_has_room(ranks: Two) -> None:
    pool, tiered, found = made(ranks)
    fill(pool, tiered, 0, 16 - AHEAD)
    found.look(early=False)
    assert ranks.asked == []
    fill(pool, tiered, 100, 1)  # the next ones that are given out hold something
    found.look(early=False)
    assert ranks.asked == [2 * RESERVE]
    assert (pool.free_blocks, tiered.host.num_used) == (16, 0)


def test_further_tiers_need_some_at_once(ranks: Two) -> None:
    _, _, found = made(ranks)
    found.look(early=True)
    assert ranks.asked == [2 * RESERVE]


def test_a_reserve_stays_ready(ranks: Two) -> None:
    """Little at a time, up to the limit; what is ready on all ranks can be used."""
    pool, tiered, found = made(ranks)
    found.look(early=True)
    for number in range(200):
        fill(pool, tiered, number, 1)
        found.look(early=False)
        used = tiered.host.num_used
        assert used <= ranks.asked[-1] - 1
        assert min(ENTRIES, used + RESERVE) <= ranks.asked[-1] <= min(ENTRIES, used + 2 * RESERVE)
    assert len(ranks.asked) < 10
    assert ranks.asked == sorted(set(ranks.asked))
    assert ranks.asked[-1] == ENTRIES
    assert len(tiered.host) == ENTRIES - 1  # one rank is late


def test_all_of_it(ranks: Two) -> None:
    _, tiered, found = made(ranks)
    assert not found.all()
    assert ranks.asked == [ENTRIES]
    assert tiered.host.num_used == 0


def test_room_for_what_is_copied_at_once(ranks: Two) -> None:
    """No more than that."""
    _, tiered, found = made(ranks)
    assert not found.has_room(BLOCKS, 5)  # one rank is late
    assert found.has_room(BLOCKS, 4)
    assert ranks.asked == [5]
    assert [entry for _, entry in tiered.host.store((0, bytes([n])) for n in range(4))] == [0, 1, 2, 3]
    assert not found.has_room(BLOCKS, 2 * ENTRIES)
    assert ranks.asked == [5, ENTRIES]


def test_a_pool_without_empty_places_soon_evicts() -> None:
    """Where nothing is copied ahead, host memory is there before the first content goes."""
    pool = BlockPool(4, True)
    tiered = TierPool(SNAPSHOTS, pool, HostCache(ENTRIES), lambda ticket: None, 0)
    found = []
    for number in range(3):
        block = pool.allocate()
        pool.store(block, 0, bytes([number]))
        found.append(tiered.evicts)
        pool.release([block])
    assert found == [False, False, True]


def test_what_is_evicted_waits_for_room(ranks: Two) -> None:
    """Before anything was prepared, too; where there is no more, only once."""
    pool, tiered, found = made(ranks)
    ranks.looks, ranks.late = 3, 0
    for number in range(30):
        block = pool.allocate()
        found.make_room({BLOCKS: tiered.num_lost})
        tiered.rescues()
        pool.store(block, 0, number.to_bytes(4, "little"))
        pool.release([block])
    assert len(tiered.host) == 30 - 16
    ranks.looks = 1 << 30
    found.make_room({BLOCKS: ENTRIES})
    assert ranks.looks < (1 << 30) - 10
    left = ranks.looks
    found.make_room({BLOCKS: ENTRIES})
    assert ranks.looks == left
