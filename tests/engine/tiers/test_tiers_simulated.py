"""The tiers under a simulated device and scheduler, with few blocks: much travels, and each sequence sees its own past.
`tests.engine.simulation` checks that in every step, and that no block is leaked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

from graphllm.config import TierConfig
from graphllm.engine.cache.block_pool import Key
from graphllm.engine.requests.request import TierStats
from graphllm.engine.schedule.scheduler_output import SchedulerLimits
from graphllm.engine.tiers.further_tier import Entries, Fetched, FurtherTier
from tests.engine.simulation import Simulation, continuation, request
from tests.engine.tiers.simulated_files import simulated_disk
from tests.tiers import draws, thorough

KINDS = {  # windows and block sizes of the groups, with recurrent states or without
    "full": ((0,), (2,), False),
    "window": ((6,), (2,), False),
    "both": ((0, 6), (2, 4), False),
    "hybrid": ((0,), (2,), True),
    "recurrent": ((), (), True),
}


class Archive:
    """A further tier that keeps contents by key, forgets some, and fails at times; all in the simulated host memory."""

    name, writes = "archive", True

    def __init__(self, sim: Simulation, random: random.Random) -> None:
        self._sim, self._random = sim, random
        self.contents: dict[Key, object] = {}
        self._fetching: list[tuple[Key, int]] = []
        self._writing: list[tuple[Key, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self._fetching or self._writing)

    def _host(self, key: Key) -> dict[int, object]:
        return self._sim.rank.host["snapshots" if key[0] < 0 else "blocks"]

    def has(self, key: Key) -> bool:
        return key in self.contents

    def fetch(self, entries: Entries) -> None:
        self._fetching += entries

    def fetched(self) -> Sequence[Fetched]:
        found = {}
        for key, entry in self._fetching[: self._random.randrange(4)]:
            filled = key in self.contents and self._random.random() < 0.8
            if filled:
                self._host(key)[entry] = self.contents[key]
            else:
                self.contents.pop(key, None)
            found[key] = filled
            self._fetching.remove((key, entry))
        return [Fetched(found, 1e-3)] if found else []

    def offer(self, entries: Entries) -> Sequence[Key]:
        taken = [(key, entry) for key, entry in entries if self._random.random() < 0.7 and key not in self.contents]
        self._writing += taken
        return [key for key, _ in taken]

    def written(self) -> Sequence[Key]:
        done = self._writing[: self._random.randrange(4)]
        for key, entry in done:
            self._writing.remove((key, entry))
            self.contents[key] = self._host(key)[entry]
        return [key for key, _ in done]

    def use(self, keys: Iterable[Key]) -> None:
        assert all(len(digest) > 8 for _, digest in keys)

    def reset(self) -> None:
        self.contents.clear()

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        pass


def run(
    kind: str, seed: int, policy: str, further: Callable[[Simulation, random.Random], FurtherTier] | None
) -> Simulation:
    """Conversations over few blocks; some requests are aborted, and some beginnings imported. further: makes a tier
    beyond host memory."""
    draw = random.Random(seed)
    windows, sizes, recurrent = KINDS[kind]
    limits = SchedulerLimits(
        max_num_seqs=draw.randint(1, 4), max_num_batched_tokens=draw.randint(6, 14), max_num_rows=8, max_len=40,
        block_size=2,
    )  # fmt: skip
    sim = Simulation(
        limits, pages=draw.randint(30, 40) * max(1, len(windows)), windows=windows, block_sizes=sizes,
        recurrent=recurrent, num_snapshots=draw.randint(2, 5) if recurrent else 0,
    )  # fmt: skip
    sim.use_tiers(TierConfig(draw.choice([20, 60, 1000]), policy), [] if further is None else [further(sim, draw)])
    assert sim.tiers is not None
    texts = [[draw.randint(1, 3) for _ in range(draw.randint(8, 16))] for _ in range(8)]
    for number in range(draws(60, 200)):
        at = draw.randrange(len(texts))
        limit = draw.randint(1, 6)
        wire = sim.add(request(f"{number}", texts[at], limit, seed=at))
        texts[at] = [*texts[at], *continuation(wire, texts[at], limit), draw.randint(1, 3)]
        if len(texts[at]) > 32:
            texts[at] = texts[at][: draw.randint(8, 16)]
        for _ in range(draw.randint(0, 12)):
            sim.step()
        waiting = [w.wire.id for w in sim.requests.values() if w.wire.id not in sim.reason]
        if waiting and draw.random() < 0.1:
            sim.abort(draw.choice(waiting))
        if draw.random() < 0.1:
            sim.adopt(sim.export(request("export", draw.choice(texts))))
    sim.run()
    sim.check()
    hosts = [pool.host for pool in sim.tiers.pools.values()]
    for _ in range(1000):  # what is being written stays until then
        if not any(host.pinned for host in hosts):
            break
        assert not list(sim.tiers.gather(idle=False))
    assert not any(host.pinned for host in hosts)
    return sim


class Stuck(Archive):
    """It has everything, and gives nothing. looked_up: how often it was asked what it has."""

    looked_up = 0

    def has(self, key: Key) -> bool:
        self.looked_up += 1
        return True

    def fetched(self) -> Sequence[Fetched]:
        return []


def test_waiting_for_what_another_request_has_brought_costs_no_look_ups() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_num_rows=8, max_len=40, block_size=2)
    sim = Simulation(limits, pages=40, windows=(0,), block_sizes=(2,))
    stuck = Stuck(sim, random.Random(0))
    sim.use_tiers(TierConfig(1000), [stuck])
    for number in range(3):
        sim.add(request(f"{number}", list(range(20))))
    for _ in range(300):  # host memory is ready, and all have asked
        sim.step()
    before = stuck.looked_up
    assert before > 0
    for _ in range(50):
        sim.step()
    assert stuck.looked_up == before
    sim.tiers.promotions.clock = lambda: float("inf")  # type: ignore[union-attr]
    for _ in range(50):
        sim.step()
    assert len(sim.reason) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_the_device_has_is_copied_before_it_forgets(kind: str) -> None:
    """Host memory is prepared for it then, little by little, and no more than that."""
    windows, sizes, recurrent = KINDS[kind]
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_num_rows=8, max_len=80, block_size=2)
    sim = Simulation(
        limits, pages=100 * max(1, len(windows)), windows=windows, block_sizes=sizes, recurrent=recurrent,
        num_snapshots=40 if recurrent else 0,
    )  # fmt: skip
    sim.use_tiers(TierConfig(1000))
    tiers = sim.tiers
    assert tiers is not None
    for turn in range(2):
        for number in range(2):
            sim.add(request(f"{turn} {number}", [number, *range(40)], 1))
        sim.run()
        assert tiers.promotions.hits["host"] == pytest.approx(turn * 2 * 40, abs=turn * 16)
        if not turn:
            assert not any(len(pool.host) for pool in tiers.pools.values())
            tiers.leave()
            assert not any(pool.unsaved() for pool in tiers.pools.values())
            assert not any(pool.host.pinned for pool in tiers.pools.values())
            assert not any(pool.host.is_ready for pool in tiers.pools.values())
            assert sim.scheduler.cache.reset()


@pytest.mark.parametrize("further", [None, Archive, simulated_disk], ids=["", "archive", "disk"])
@pytest.mark.parametrize("policy", ["lru", thorough("arc")])
@pytest.mark.parametrize("kind", KINDS)
def test_pasts(kind: str, policy: str, further: Callable[[Simulation, random.Random], FurtherTier] | None) -> None:
    """Runs end when each tier was found, which is chance: what is evicted first follows from digests, and these from a
    secret."""
    hits, least = Counter[str](), draws(3, 30)
    expected = {"host"} | (set() if further is None else {"archive" if further is Archive else "disk"})
    for seed in range(10 * least):
        sim = run(kind, seed, policy, further)
        assert sim.tiers is not None
        hits.update(sim.tiers.promotions.hits)
        if seed + 1 >= least and all(hits[name] for name in expected):
            break
    assert {name for name in ("host", "archive", "disk") if hits[name]} == expected
