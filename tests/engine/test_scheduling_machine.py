"""Random requests, aborts, drafts and resets over few pages: a hypothesis state machine drives the scheduler as the
engine core does. What must hold in each step is checked by `simulation.Simulation`; here, that everything ends."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulation import VOCAB, Simulation, continuation, request

from graphllm.engine.request import EngineRequest
from graphllm.engine.scheduler import SchedulerLimits

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
        windows=st.sampled_from([(0,), (0, 6), (4,)]),
        block_size=st.integers(2, 4),
        pages=st.integers(8, 30),
        seqs=st.integers(2, 5),
        tokens=st.integers(5, 14),
        more_rows=st.integers(0, 4),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 0, 2, 5]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self, windows: tuple[int, ...], block_size: int, pages: int, seqs: int, tokens: int, more_rows: int,
        policy: str, threshold: int, caching: bool,
    ) -> None:  # fmt: skip
        limits = SchedulerLimits(
            max_num_seqs=seqs, max_num_batched_tokens=tokens, max_num_rows=seqs + more_rows, max_len=32,
            block_size=block_size,
            policy=policy, long_prefill_token_threshold=threshold,
        )  # fmt: skip
        self.sim = Simulation(limits, pages, windows, caching)
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
    )
    def add(
        self, prompt: list[int], limit: int, seed: int, priority: int, salt: str, stop_ids: list[int], scored: bool,
        unread: bool | None, error_at: int, siblings: int,
    ) -> None:  # fmt: skip
        capacity = self.sim.scheduler.capacity
        prompt = prompt[: capacity - 1]
        leader = ""
        for i in range(1 + siblings):
            wire = request(
                str(len(self.added)), prompt, min(limit, capacity - len(prompt)), seed=seed + i, priority=priority,
                cache_salt=salt, stop_ids=stop_ids, scored=scored, unread=unread, fork_of=leader,
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
        )  # fmt: skip
        self.added.append(self.sim.add(wire))

    @rule(count=st.integers(1, 6), drafted=st.sampled_from([None, None, 0, 1, 3]))
    def step(self, count: int, drafted: int | None) -> None:
        """drafted: before each step drafts for all, so many of which are right."""
        for _ in range(count):
            if drafted is not None:
                for id in self._idle():
                    self._propose(id, drafted, 1)
            self._step()

    def _idle(self) -> list[str]:
        """Requests that ran before and have no drafts in flight."""
        return [id for id in self._unfinished() if id in self.sim.alive and not self.sim.verifying(id)]

    def _propose(self, id: str, right: int, wrong: int) -> None:
        drafts = continuation(self.sim.requests[id].wire, self.sim.past(id), right + wrong)
        drafts[right:] = [(t + 1) % VOCAB for t in drafts[right:]]
        self.sim.scheduler.propose(self.sim.alive[id], drafts)

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

    @precondition(lambda self: self._idle())
    @rule(number=st.integers(0, 1000), right=st.integers(0, 4), wrong=st.integers(0, 2))
    def propose(self, number: int, right: int, wrong: int) -> None:
        """Drafts of which the first are right."""
        ids = self._idle()
        self._propose(ids[number % len(ids)], right, wrong)

    @rule()
    def reset_cache(self) -> None:
        idle = self.sim.pool.free_blocks == len(self.sim.pool.references) - 1
        assert self.sim.pool.reset_cache() == idle

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
        assert sim.pool.free_blocks == len(sim.pool.references) - 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
