"""Scheduler: which requests get how many tokens in the next step. Policy only, and no torch.

Running requests go first, those with one token to compute before prompts, so that a long prompt never holds up a
stream. What a step needs of a running request lies in arrays by slot (`request_table`), so a step in which all decode
is a few array operations, and Python runs only where something happens: a block is full, a request comes or goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.admission import Admission, Entries
from graphllm.engine.schedule.chunks import Chunks
from graphllm.engine.schedule.results import Commit, take_step
from graphllm.engine.schedule.scheduler_output import NO_DRAFTS, DraftResults, SchedulerLimits, SchedulerOutput
from graphllm.engine.schedule.stage_share import PipelineShare, StageShare
from graphllm.engine.schedule.verification import Verification
from graphllm.program.schema import CacheLayout


class Scheduler:
    """The cache and the request table belong to this scheduler only.

    caching, secret: see `CacheManager`.
    admission: requests that wait, and what they need to join.
    verification: says whether a step verifies drafts.
    """

    def __init__(
        self, limits: SchedulerLimits, layout: CacheLayout, caching: bool = True, secret: str | None = None
    ) -> None:
        self._limits, self._layout = limits, layout
        self.verification = Verification()
        self.requests = RequestTable(limits.max_num_seqs)
        self.cache = CacheManager(
            layout, limits.block_size, limits.max_num_seqs, limits.max_len, limits.max_num_batched_tokens, caching,
            secret, limits.snapshot_interval,
        )  # fmt: skip
        self._by_id: dict[str, RequestState] = {}
        self.chunks = Chunks(limits, layout, self.requests, self.cache.states)
        self.admission = Admission(limits, layout, self.requests, self.cache, self.chunks, self._by_id)
        self._copies: list[tuple[int, int]] = []
        self._admitted: list[RequestState] = []
        self._arrivals = itertools.count()
        self.preemptions = 0
        self._share = StageShare()
        if limits.pipeline_depth > 1:
            self._share = PipelineShare(limits.pipeline_depth, limits.min_batch_per_stage)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self.requests.running)

    @property
    def waiting(self) -> int:
        """Requests without one."""
        return len(self._by_id) - len(self.requests.running)

    @property
    def unfinished(self) -> int:
        """All of them."""
        return len(self._by_id)

    @property
    def states(self) -> Iterable[RequestState]:
        """All of them, with and without a slot."""
        return self._by_id.values()

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits into an empty cache."""
        return self.cache.capacity

    def check(self, request: EngineRequest) -> None:
        """Raise ConfigError for a request that cannot run, QueueFullError when no more may wait."""
        if request.id in self._by_id:
            raise ConfigError(f"request_id: {request.id!r} is already running; ids must be unique")
        self.admission.check(request, self.waiting)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises as `check` does."""
        self.check(request)
        state = RequestState(request, (self.urgency(request), next(self._arrivals)))
        self._by_id[request.id] = state
        self.admission.push(state)

    def urgency(self, request: EngineRequest) -> int:
        """The place of a request among others: lower goes first, and what came first of equal ones. A subclass may say
        another."""
        return request.priority if self._limits.policy == "priority" else 0

    def abort(self, ids: Iterable[str]) -> list[RequestState]:
        """Drop requests; what is in flight for them is ignored when it comes. Those that there were."""
        dropped = []
        for id in ids:
            if (state := self._by_id.get(id)) is not None:
                self._finish(state, "abort")
                dropped.append(state)
        return dropped

    def fail(self, state: RequestState, error: str, mistake: bool = False) -> None:
        """End a request with an error, which may be its own mistake."""
        state.error, state.mistake = error, mistake
        self.end(state, "error")

    def end(self, state: RequestState, reason: str) -> None:
        """End a request for a reason that only the caller knows."""
        if state.finish_reason is None:
            self._finish(state, reason)
        else:
            state.finish_reason = reason

    def next(self) -> SchedulerOutput | None:
        """The next step's work; None when nothing can be done before the step in flight has ended."""
        t = self.requests
        self._copies, self._admitted = [], []
        entries: Entries = []
        budget, rows, preempted = self._limits.max_num_batched_tokens, self._limits.max_num_rows, self.preemptions
        # Over all slots, which is faster than picking the used ones: a free one has nothing to do.
        known = t.num_tokens + t.num_in_flight
        todo = known - t.num_computed_tokens
        ready = (known < t.limit) | (t.num_computed_tokens < t.num_prompt_tokens)
        ready &= todo > 0
        most = self._share.choose(t, ready, todo, waiting=bool(self.admission))
        if not (self.admission or np.count_nonzero(ready)):
            return None
        decode = ready & (todo == 1)
        chosen = self._with_blocks(decode, known)
        chunks = np.count_nonzero(ready) > np.count_nonzero(decode)
        query_len = 1
        if len(chosen):
            chosen = chosen[: min(budget, rows, most)]
            query_len = self._verify(chosen, known[chosen], undivided=not (chunks or self.admission))
            entries.append((chosen, np.full(len(chosen), query_len, dtype=np.int32)))
            budget, rows = budget - query_len * len(chosen), rows - query_len * len(chosen)
        if chunks:
            budget, rows = self._add_chunks(entries, t.order[(ready & ~decode)[t.order]], budget, rows)
        if self.admission and self.preemptions == preempted:
            self._admitted = self.admission.admit(entries, budget, rows, self._copies)
        if not entries:
            return None
        slots, counts = entries[0]
        if len(entries) > 1:
            slots, counts = (np.concatenate(parts, dtype=np.int32) for parts in zip(*entries, strict=True))
        return self._plan(slots, counts, query_len, len(chosen) if query_len > 1 else 0)

    def _plan(self, slots: np.ndarray, counts: np.ndarray, query_len: int, verified: int) -> SchedulerOutput:
        t = self.requests
        starts, in_flight, known = t.num_computed_tokens[slots], t.num_in_flight[slots], t.num_tokens[slots]
        ends, ahead = starts + counts, self._layout.ahead(query_len)
        drafts = pending = None
        if np.count_nonzero(unsure := t.num_unsure[slots]):
            pending = unsure > 0
        samples = ends == known + in_flight
        rows = samples.astype(np.int32)
        if verified:
            samples[:verified], rows[:verified] = True, ahead
            drafts = self.verification.drafts(slots[:verified], query_len)
            t.num_unsure[slots[:verified]] += ahead - 1
        num_independent = self._share.planned(t, slots, in_flight, samples)
        in_flight += rows
        rows[:verified] = query_len
        by_slot = t.by_slot
        requests: list[RequestState] = [by_slot[s] for s in slots.tolist()]
        if np.count_nonzero(t.scoring):
            for i in verified + np.flatnonzero(t.scoring[slots[verified:]]):
                rows[i] = self.chunks.rows(requests[i], int(slots[i]), int(counts[i]))
                requests[i].scored = max(requests[i].scored, int(min(ends[i], t.num_prompt_tokens[slots[i]] - 1)))
        fed = starts >= known
        if self._layout.lookahead:
            self.cache.look_ahead(slots, ends)
        ends[:verified] = starts[:verified] + ahead
        t.num_computed_tokens[slots] = ends
        t.num_in_flight[slots] = in_flight
        num_drafts = self.verification.made(slots)
        states = self.cache.states
        saves, exports = states.reserve(requests, slots, starts, ends, known, pending, verified)
        return SchedulerOutput(
            requests, slots, starts, counts, rows, samples, fed, t.epoch[slots], self.cache.tables, query_len, ahead,
            verified, drafts, pending, num_drafts, num_independent, self._copies, *states.beginnings(),
            saves, exports, self._admitted,
        )  # fmt: skip

    def _verify(self, slots: np.ndarray, known: np.ndarray, undivided: bool) -> int:
        """Tokens for each of these slots; all of them decode. undivided: nothing else wants a part of the step."""
        budget = self._limits.max_num_batched_tokens
        query_len = self.verification.query_len(slots, known, budget if undivided else budget // 2)
        if query_len == 1:
            return 1
        ends = self.requests.num_computed_tokens[slots] + query_len
        late = ends > self.cache.reach[slots]
        return query_len if self.cache.extend_all(slots[late], ends[late]) else 1

    def _add_chunks(self, entries: Entries, slots: np.ndarray, budget: int, rows: int) -> tuple[int, int]:
        """Chunks of running prompts, as far as the budget goes; what is left of it."""
        planned = {slot for chosen, _ in entries for slot in chosen.tolist()}
        for slot in slots.tolist():
            state = self.requests.by_slot[slot]
            if budget <= 0 or state is None:
                continue
            count = self._blocks_for_chunk(state, self.chunks.fitting(state, slot, budget, rows), planned)
            if count:
                entries.append((np.array([slot], dtype=np.int32), np.array([count], dtype=np.int32)))
                planned.add(slot)
                budget -= count
                rows -= self.chunks.rows(state, slot, count)
        return budget, rows

    def _with_blocks(self, decode: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The decoding slots, in order, that have the blocks for their next tokens; others were preempted. decode,
        ends: of all slots, whether they decode and how far their tokens then go."""
        t, cache = self.requests, self.cache
        slots = t.order[decode[t.order]]
        starts = t.num_computed_tokens - t.num_unsure
        events = cache.unready(starts, ends) & decode
        if not np.count_nonzero(events):
            return slots
        before = self.preemptions
        at = slots[events[slots]]
        if cache.extend_each(at, ends[at]):
            return slots
        for slot, start, end in zip(at.tolist(), starts[at].tolist(), ends[at].tolist(), strict=True):
            state = t.by_slot[slot]
            if state is None:  # preempted for one before it
                continue
            while not cache.extend(slot, start, end, self._copies):
                victim = t.running[-1]
                self.preempt(victim)
                if victim is state:
                    break
        if self.preemptions == before:
            return slots
        return slots[[t.by_slot[s] is not None for s in slots.tolist()]]

    def _blocks_for_chunk(self, state: RequestState, count: int, planned: set[int]) -> int:
        """Tokens of a running prompt's chunk for which there are blocks. Others not in the plan yet are preempted for
        them."""
        running, start = self.requests.running, int(self.requests.num_computed_tokens[state.slot])
        while count:
            if self.cache.extend(state.slot, start, start + count, self._copies):
                return count
            victim = next((s for s in reversed(running) if s.slot not in planned), None)
            if victim is None or victim is state:
                # What others hold of the step comes back with them; if nothing else runs, it starts anew.
                if victim is state and not planned and len(running) > 1:
                    self.preempt(state)
                return 0
            self.preempt(victim)
        return 0

    def commit(self, output: SchedulerOutput, tokens: np.ndarray, of_drafts: DraftResults = NO_DRAFTS) -> Commit:
        """Take a step's result. Requests that are gone or were preempted since are passed over.

        tokens [R] int32: of the step's rows in order. A negative one, where no token could be chosen, ends the request
        with an error.
        """
        self._share.committed()
        t = self.requests
        live = t.epoch[output.slots] == output.epochs
        given = self.verification.given(output, live, of_drafts)
        commit, ends = take_step(t, output, tokens, of_drafts.num_kept, given.drafted, live)
        self.verification.taken(output, live, of_drafts, given, [state.slot for state, _ in ends])
        self._store_due(output, live)
        for state, reason in ends:
            if reason != "error":
                self._store(state)
            self._finish(state, reason)
        return commit

    def _store_due(self, output: SchedulerOutput, live: np.ndarray) -> None:
        """Make findable what the step has computed, and let go of its snapshots."""
        cache, t, slots = self.cache, self.requests, output.slots
        ends = output.starts + output.counts
        if cache.caching:
            for slot in slots[cache.due(slots, ends) & live].tolist():
                if (state := t.by_slot[slot]) is not None:
                    self._store(state)
        cache.states.store(output.requests, slots, ends, live, output.snapshot_saves, output.snapshot_loads)

    def _store(self, state: RequestState) -> None:
        t, slot = self.requests, state.slot
        self.cache.store(state, int(min(t.num_computed_tokens[slot], t.num_tokens[slot], state.num_tokens)))

    def preempt(self, state: RequestState) -> None:
        """Take a request's blocks; it waits, in its old place, to be computed again. What is in flight is lost."""
        self.preemptions += 1
        state.preemptions += 1
        self._store(state)  # with luck some of it is still there then
        self._leave(state)
        self.admission.push(state)

    def _leave(self, state: RequestState) -> None:
        self.admission.release(state, joined=True)
        self.cache.free(state.slot)
        self.requests.leave(state)

    def _finish(self, state: RequestState, reason: str) -> None:
        state.finish_reason = reason
        del self._by_id[state.request.id]
        if state.slot >= 0:
            self._leave(state)
