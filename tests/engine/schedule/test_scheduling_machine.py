"""Random requests, aborts, drafts and resets over few pages: a hypothesis state machine drives the scheduler as the
engine core does. What must hold in each step is checked by `simulation.Simulation`; here, that everything ends."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from graphllm.config import TierConfig
from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.schedule.scheduler_output import SchedulerLimits
from tests.engine.simulation import VOCAB, Content, Simulation, continuation, item, request
from tests.tiers import draws

BEGINNINGS = ([1] * 16, [1, 2] * 8, [3, 1, 1, 2] * 4)


@st.composite
def prompts(draw: Any) -> list[int]:
    """Short prompts over few tokens; most begin alike."""
    base = draw(st.sampled_from(BEGINNINGS))
    tail = draw(st.lists(st.integers(1, 3), max_size=3))
    return base[: draw(st.integers(0 if tail else 1, 16))] + tail


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go at any time."""

    broken = True  # until the first step is about to be made, and after one that failed

    @initialize(
        groups=st.sampled_from(
            [
                ((0,), (1,)),
                ((0,), (1,)),
                ((0, 6), (1, 1)),
                ((4,), (1,)),
                ((0, 6), (1, 2)),
                ((5, 0), (1, 4)),
                ((), ()),
            ]
        ),
        block_size=st.integers(2, 4),
        pages=st.integers(8, 30),
        seqs=st.integers(2, 5),
        tokens=st.integers(5, 14),
        more_rows=st.integers(0, 9),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 0, 2, 5]),
        caching=st.sampled_from([True, True, True, False]),
        snapshots=st.sampled_from([None, None, 0, 1, 3, 8]),
        interval=st.sampled_from([0, 0, 3, 8]),
        exports=st.sampled_from([(), (90,), (90, 91)]),
        border=st.integers(1, 6),
        query_lens=st.sampled_from([(), (), (2,), (3,), (2, 3, 5)]),
        device_drafts=st.booleans(),
        tiers=st.sampled_from([0, 0, 5, 15, 200]),
        arc=st.booleans(),
    )
    def start(
        self, groups: tuple[tuple[int, ...], tuple[int, ...]], block_size: int, pages: int, seqs: int, tokens: int,
        more_rows: int, policy: str, threshold: int, caching: bool, snapshots: int | None, interval: int,
        exports: tuple[int, ...], border: int, query_lens: tuple[int, ...], device_drafts: bool, tiers: int, arc: bool,
    ) -> None:  # fmt: skip
        limits = SchedulerLimits(
            max_num_seqs=seqs, max_num_batched_tokens=tokens, max_num_rows=seqs + more_rows, max_len=32,
            block_size=block_size, policy=policy, long_prefill_token_threshold=threshold, snapshot_interval=interval,
        )  # fmt: skip
        windows, multiples = groups
        self.sim = Simulation(
            limits, pages, windows, caching, tuple(m * block_size for m in multiples),
            recurrent=snapshots is not None, num_snapshots=snapshots or 0, item_tokens=8, max_adapters=2,
            query_lens=query_lens, device_drafts=device_drafts, next_seen=device_drafts, exports=exports, border=border,
            tiers=TierConfig(tiers, "arc" if arc else "lru") if tiers else None,
        )  # fmt: skip
        # Where nothing is kept between steps, a prompt is computed in one, all of its scored rows included.
        self.longest = 32 if windows or snapshots is not None else min(tokens, seqs + more_rows)
        self.exported: list[Content] = []
        self.added: list[EngineRequest] = []
        self.broken = False

    @rule(
        prompt=prompts(),
        limit=st.integers(1, 14),
        seed=st.integers(0, 2),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "", "x"]),
        stop_ids=st.sampled_from([[], [], [0], [3, 7], [0, 5, 6, 7, 8, 9]]),
        scored=st.sampled_from([False, False, False, True]),
        unread=st.sampled_from([None, None, None, True]),
        error_at=st.sampled_from([-1, -1, -1, -1, -1, 0, 2]),
        siblings=st.sampled_from([0, 0, 0, 1, 2, 3]),
        adapter=st.sampled_from([0, 0, 0, 1, 2, 3, 4]),
        items=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 9), st.integers(1, 4)), max_size=2),
    )
    def add(
        self, prompt: list[int], limit: int, seed: int, priority: int, salt: str, stop_ids: list[int], scored: bool,
        unread: bool | None, error_at: int, siblings: int, adapter: int, items: list[tuple[str, int, int]],
    ) -> None:  # fmt: skip
        capacity = self.sim.scheduler.capacity
        prompt = prompt[: min(capacity - 1, self.longest)]
        # Equal contents are of equal lengths; items stand one behind the other.
        placed = [item(f"{c}{n}", p, n) for c, p, n in items if p + n <= len(prompt)]
        if len(placed) == 2 and 0 <= placed[1].position < placed[0].position + placed[0].length:
            placed.pop()
        leader = ""
        for i in range(1 + siblings):
            wire = request(
                str(len(self.added)), prompt, min(limit, capacity - len(prompt)), seed=seed + i, priority=priority,
                cache_salt=salt, stop_ids=stop_ids, scored=scored, unread=unread, fork_of=leader,
                adapter=adapter, items=placed,
            )  # fmt: skip
            self.added.append(self.sim.add(wire, error_at))
            leader = leader or wire.id

    @precondition(lambda self: self.added)
    @rule(number=st.integers(0, 1000), limit=st.integers(1, 14), seed=st.integers(0, 9))
    def fork(self, number: int, limit: int, seed: int) -> None:
        """A late sibling; its leader may wait, run, have been preempted, or be gone."""
        leader = self.added[number % len(self.added)]
        wire = request(
            str(len(self.added)), leader.prompt, min(limit, self.sim.scheduler.capacity - len(leader.prompt)),
            seed=seed, fork_of=leader.id, cache_salt=leader.cache_salt, priority=leader.priority,
            adapter=leader.adapter, items=leader.items,
        )  # fmt: skip
        self.added.append(self.sim.add(wire))

    @rule(count=st.integers(1, 6), drafted=st.sampled_from([None, None, 0, 1, 3]), right=st.integers(0, 5))
    def step(self, count: int, drafted: int | None, right: int) -> None:
        """drafted: before each step the host proposes drafts for all, so many of which are right. right: of drafts on
        the device."""
        self.sim.right = right
        for _ in range(count):
            if drafted is not None:
                for id in self._drafting():
                    self._propose(id, drafted, 1)
            self._step()

    def _drafting(self) -> list[str]:
        """Requests that ran before."""
        return [id for id in self._unfinished() if id in self.sim.alive]

    def _propose(self, id: str, right: int, wrong: int) -> None:
        """Tokens expected behind those that the host knows; those in flight are right."""
        wire, flying = self.sim.requests[id].wire, len(self.sim.past(id)) - len(self.sim.output[id])
        right += max(0, flying - len(wire.prompt))
        drafts = continuation(wire, [*wire.prompt, *self.sim.output[id]], right + wrong)
        drafts[right:] = [(t + 1) % VOCAB for t in drafts[right:]]
        self.sim.scheduler.requests.propose(self.sim.alive[id], drafts)

    def _step(self) -> None:
        self.broken = True
        self.sim.step()
        self.broken = False

    def _unfinished(self) -> list[str]:
        return [w.id for w in self.added if w.id not in self.sim.reason]

    @precondition(lambda self: self._unfinished())
    @rule(number=st.integers(0, 1000))
    def abort(self, number: int) -> None:
        ids = self._unfinished()
        self.sim.abort(ids[number % len(ids)])

    @precondition(lambda self: self._drafting())
    @rule(number=st.integers(0, 1000), right=st.integers(0, 4), wrong=st.integers(0, 2))
    def propose(self, number: int, right: int, wrong: int) -> None:
        """Drafts of which the first are right."""
        ids = self._drafting()
        self._propose(ids[number % len(ids)], right, wrong)

    @precondition(lambda self: self.added)
    @rule(number=st.integers(0, 1000))
    def export(self, number: int) -> None:
        """What the cache has of a request's text so far is brought in again later."""
        wire = self.added[number % len(self.added)]
        text = [*wire.prompt, *self.sim.output[wire.id]]
        self.exported = self.sim.export(
            request("export", text, adapter=wire.adapter, cache_salt=wire.cache_salt, items=wire.items)
        )

    @precondition(lambda self: self.exported)
    @rule()
    def adopt(self) -> None:
        self.sim.adopt(self.exported)

    @rule()
    def reset_cache(self) -> None:
        pools = [self.sim.pool, *(snapshots.pool for snapshots in self.sim.scheduler.cache.states.pools)]
        idle = all(pool.free_blocks == len(pool.references) - 1 for pool in pools)
        idle &= not (self.sim.layout.recurrent and self.sim.scheduler.running)
        assert self.sim.scheduler.cache.reset() == idle

    def teardown(self) -> None:
        """Whatever there was comes to its end, soon, and leaves nothing behind."""
        if self.broken:
            return
        sim = self.sim
        for _ in range(20 + 70 * len(self._unfinished())):
            if not sim.unfinished:
                break
            self._step()
        assert not sim.unfinished, "no progress"
        assert set(sim.reason) == set(sim.requests)
        sim.check()
        assert sim.pool.free_blocks == len(sim.pool.references) - 1
        assert sim.items.cache.held_rows == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=draws(40, 120), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestSchedulerAtLength(SchedulerMachine.TestCase):  # type: ignore[misc,name-defined]
    """Many more such runs."""

    settings = settings(TestScheduler.settings, max_examples=1000)
