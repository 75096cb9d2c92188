"""A simulated model and device under the scheduler, driven as the engine core drives the real ones.

The cache is a dict from (page, offset) to what is written there: a hash of the salt and of all token ids up to that
position. So every step can check that each position a sequence sees leads to exactly its own past, whatever was shared,
copied, evicted or rolled back. The next token is a function of that hash, so what a request gets alone is known.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from graphllm.config.sampling import SamplingParams
from graphllm.engine.pool import BlockPool
from graphllm.engine.request import EngineRequest
from graphllm.engine.scheduler import Commit, Plan, Scheduler, SchedulerLimits, Sequence

VOCAB = 4  # sampled tokens are below
ERROR = -1


@dataclass(frozen=True)
class Entry:
    """A plan's entry."""

    id: str
    start: int
    count: int
    rows: int
    samples: bool
    fed: bool


class Request(NamedTuple):
    """What the simulation knows of a request. expected: the tokens and the end it has alone."""

    wire: EngineRequest
    error_at: int
    expected: list[int]
    reason: str


def extend(before: int, token: int) -> int:
    """Hash of a token and all before it."""
    return hash((before, token))


def beginning(salt: str) -> int:
    """Hash of nothing."""
    return zlib.crc32(salt.encode())


def sample(seed: int, past: int) -> int:
    """The token behind that past."""
    return hash((seed, past, 5)) % VOCAB


def continuation(request: EngineRequest, known: List[int], count: int) -> list[int]:
    """The next tokens of a sequence, whatever would end it."""
    past = beginning(request.cache_salt)
    for token in known:
        past = extend(past, token)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(sample(request.seed, past))
        past = extend(past, tokens[-1])
    return tokens


def alone(request: EngineRequest, error_at: int = -1) -> tuple[list[int], str]:
    """The tokens of a request and why it ends. error_at: output index at which no token can be chosen."""
    tokens: list[int] = []
    for i, token in enumerate(continuation(request, request.prompt, request.limit)):
        if i == error_at:
            return tokens, "error"
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, "stop"
    return tokens, "length"


def request(id: str, prompt: List[int], limit: int = 4, **fields: Any) -> EngineRequest:
    """A request. scored: with prompt_logprobs. unread: with skip_reading_prefix_cache."""
    scored, unread = fields.pop("scored", False), fields.pop("unread", None)
    params = SamplingParams(max_tokens=limit, prompt_logprobs=1 if scored else None, skip_reading_prefix_cache=unread)
    given: dict[str, Any] = {"stop_ids": [], "seed": 0} | fields
    return EngineRequest(id=id, prompt=list(prompt), params=params, limit=limit, **given)


class Simulation:
    """A scheduler with its pool and a device. Each step checks what must hold, whatever the requests."""

    def __init__(self, limits: SchedulerLimits, pages: int, windows: tuple[int, ...] = (0,), caching: bool = True):
        self.limits, self.windows = limits, windows
        self.pool = BlockPool(pages, caching, secret=b"s")
        self.scheduler = Scheduler(limits, self.pool, windows)
        self.requests: dict[str, Request] = {}
        self.output: dict[str, list[int]] = {}
        self.reason: dict[str, str] = {}
        self.alive: dict[str, Sequence] = {}  # as the plans name them
        self.scored: dict[str, list[int]] = {}  # prompt positions, as planned
        self.cached: dict[str, int] = {}  # first position computed after the latest admission
        self.copied: list[tuple[int, int]] = []  # pages, since the beginning
        self._computed: dict[str, int] = {}
        self._cache: dict[tuple[int, int], tuple[int, int]] = {}
        self._last = [0] * limits.max_num_seqs  # on the device, by slot
        self._in_flight: tuple[Plan, list[str], np.ndarray, dict[int, list[int]]] | None = None

    def add(self, wire: EngineRequest, error_at: int = -1) -> EngineRequest:
        """Queue a request."""
        self.scheduler.add(wire)
        self.requests[wire.id] = Request(wire, error_at, *alone(wire, error_at))
        self.output[wire.id] = []
        return wire

    def abort(self, *ids: str) -> None:
        """End requests, which all run or wait."""
        gone = self.scheduler.abort(ids)
        assert [s.request.id for s in gone] == list(ids)
        for id in ids:
            self.reason[id] = "abort"
        self.check()

    def step(self) -> list[Entry]:
        """One turn of the loop: plan and start a step, then take the result of the one before."""
        streams = self._streams()
        preemptions = self.scheduler.preemptions
        plan = self.scheduler.next()
        assert plan is None or not plan.admitted or self.scheduler.preemptions == preemptions
        self._check_streams(streams, plan)
        started = None if plan is None else self._start(plan)
        entries = [] if plan is None else _entries(plan)
        self.check()
        if self._in_flight is not None:
            plan_before, ids, tokens, accepted = self._in_flight
            self._take(self.scheduler.commit(plan_before, tokens, accepted), plan_before, ids, tokens, accepted)
            self.check()
        self._in_flight = started
        return entries

    def run(self, most: int = 10_000) -> list[list[Entry]]:
        """Step until nothing is left to do."""
        plans = []
        while self.unfinished:
            plans.append(self.step())
            assert len(plans) <= most, "no progress"
        return plans

    @property
    def unfinished(self) -> bool:
        """Whether requests run or wait, or a step is in flight."""
        return self.scheduler.unfinished > 0 or self._in_flight is not None

    def past(self, id: str) -> list[int]:
        """A request's tokens, the one in flight included."""
        known, slot = [*self.requests[id].wire.prompt, *self.output[id]], self.alive[id].slot
        return [*known, self._last[slot]] if slot >= 0 and self.scheduler.inflight[slot] else known

    def verifying(self, id: str) -> bool:
        """Whether drafts of a request are in flight."""
        sequence = self.alive[id]
        return sequence.slot >= 0 and bool(sequence.drafts) and self._computed[id] >= len(self.past(id))

    def decoding(self) -> list[str]:
        """Running requests with one token to compute, and drafts, in order."""
        running = sorted(s for id, s in self.alive.items() if s.slot >= 0 and id not in self.reason)
        return [s.request.id for s in running if self._computed[s.request.id] == len(self.past(s.request.id)) - 1]

    def _streams(self) -> dict[str, int]:
        """Tokens that each running request with a token to sample asks for; those may not be held up."""
        wanted = {}
        for id in self.decoding():
            sequence, wire = self.alive[id], self.requests[id].wire
            waits = bool(sequence.drafts) and self.scheduler.inflight[sequence.slot] > 0
            if not waits and len(self.past(id)) < len(wire.prompt) + wire.limit:
                wanted[id] = 1 + len(sequence.drafts)
        return wanted

    def _check_streams(self, wanted: dict[str, int], plan: Plan | None) -> None:
        planned = [] if plan is None else [s.request.id for s in plan.sequences]
        room = min(self.limits.max_num_batched_tokens, self.limits.max_num_rows)
        for id, tokens in wanted.items():
            if self.alive[id].slot >= 0:  # not preempted
                room -= tokens
                assert id in planned or room < 0, "a stream is held up"

    def _start(self, plan: Plan) -> tuple[Plan, list[str], np.ndarray, dict[int, list[int]]]:
        """What the device does with a step; checks that it may."""
        limits, page = self.limits, self.limits.block_size
        n = len(plan.sequences)
        assert n == len(set(plan.slots.tolist())) > 0
        assert [s.slot for s in plan.sequences] == plan.slots.tolist()
        assert 0 < plan.counts.sum() <= limits.max_num_batched_tokens
        assert plan.rows.sum() <= limits.max_num_rows
        assert self.scheduler.running <= limits.max_num_seqs
        self.copied += plan.copies
        for source, target in plan.copies:
            assert source != target
            for offset in range(page):
                if (source, offset) in self._cache:
                    self._cache[target, offset] = self._cache[source, offset]
                else:
                    self._cache.pop((target, offset), None)
        pasts, hashes = [], []
        for i, (sequence, entry) in enumerate(zip(plan.sequences, _entries(plan), strict=True)):
            id = sequence.request.id
            assert id not in self.reason, "a request that ended is planned"
            if sequence in plan.admitted:
                self._computed[id] = self.cached[id] = entry.start
                self.alive[id] = sequence
            assert entry.start == self._computed[id]
            past = [*sequence.request.prompt, *self.output[id]]
            if entry.fed:
                past.append(self._last[sequence.slot])
                assert (entry.start, entry.count) == (len(past) - 1, 1)
            past += sequence.drafts
            assert entry.count > 0
            assert entry.start + entry.count <= len(past)
            assert entry.samples == (entry.start + entry.count == len(past))
            if entry.samples:
                assert len(past) - len(sequence.drafts) - len(sequence.request.prompt) < sequence.request.limit
            threshold = limits.long_prefill_token_threshold
            if threshold:
                assert entry.count <= max(threshold, 1 + len(sequence.drafts))
            self._computed[id] += entry.count
            pasts.append(past)
            hashes.append(_hashes(sequence.request.cache_salt, past))
            self._check_past(plan, i, hashes[i], entry.start)
            self._score(entry, sequence)
        for i, sequence in enumerate(plan.sequences):
            start, end = int(plan.starts[i]), int(plan.starts[i] + plan.counts[i])
            for g in range(len(self.windows)):
                for position in range(start, end):
                    at = int(plan.tables[g, sequence.slot, position // page])
                    assert at
                    assert self.pool.exclusive(at), "writes a page that others see"
                    self._cache[at, position % page] = (g, hashes[i][position])
        for i in range(n):
            self._check_past(plan, i, hashes[i], int(plan.starts[i] + plan.counts[i]))
        return self._sample(plan, pasts)

    def _check_past(self, plan: Plan, i: int, hashes: list[int], end: int) -> None:
        """What the entry's first position sees, up to ``end``, is there; what lies behind its window was given back."""
        page, slot, start = self.limits.block_size, int(plan.slots[i]), int(plan.starts[i])
        for g, window in enumerate(self.windows):
            first = max(0, start - window + 1) if window else 0
            for position in range(first, end):
                at = int(plan.tables[g, slot, position // page])
                assert at, f"group {g}: position {position} of {plan.sequences[i].request.id} has no page"
                assert self._cache.get((at, position % page)) == (g, hashes[position]), (
                    f"group {g}: position {position} of {plan.sequences[i].request.id} leads to something else"
                )
            assert not plan.tables[g, slot, : first // page].any(), "holds pages behind the window"

    def _score(self, entry: Entry, sequence: Sequence) -> None:
        """Rows are the sampled one, one for each draft, and prompt positions to be scored."""
        end, prompt = entry.start + entry.count, sequence.request.prompt
        sampled = (1 + len(sequence.drafts)) if entry.samples else 0
        positions = list(range(end - entry.rows, end - sampled))
        if sequence.request.params.prompt_logprobs is None:
            assert not positions
            return
        assert all(entry.start <= p < len(prompt) - 1 for p in positions)
        self.scored.setdefault(entry.id, []).extend(positions)

    def _sample(self, plan: Plan, pasts: list[list[int]]) -> tuple[Plan, list[str], np.ndarray, dict[int, list[int]]]:
        tokens = np.full(int(plan.rows.sum()), VOCAB + 1, dtype=np.int32)  # scores have no token
        accepted = {}
        ends = np.cumsum(plan.rows)
        for i, sequence in enumerate(plan.sequences):
            if not plan.samples[i]:
                continue
            wire, drafts = sequence.request, sequence.drafts
            before = len(pasts[i]) - len(drafts)
            true = continuation(wire, pasts[i][:before], len(drafts) + 1)
            error = self.requests[wire.id].error_at - (before - len(wire.prompt))
            if 0 <= error < len(true):
                true[error] = ERROR
            if drafts:
                kept = next((j for j, d in enumerate(drafts) if d != true[j]), len(drafts))
                accepted[i] = true[: kept + 1]
                continue
            tokens[ends[i] - 1] = self._last[sequence.slot] = true[0]
        return plan, [s.request.id for s in plan.sequences], tokens, accepted

    def _take(
        self, commit: Commit, plan: Plan, ids: list[str], tokens: np.ndarray, accepted: dict[int, list[int]]
    ) -> None:
        """Compare news with what each request gets alone."""
        assert len({id(s) for s in commit.sequences}) == len(commit.sequences)
        ends = np.cumsum(plan.rows)
        for sequence, new in zip(commit.sequences, commit.tokens, strict=True):
            name = sequence.request.id
            assert name in ids
            assert name not in self.reason, "news of a request that ended"
            self.output[name] += new
            assert sequence.output == self.output[name]
            known = self.requests[name]
            assert self.output[name] == known.expected[: len(self.output[name])]
            i = ids.index(name)
            newest = accepted[i][-1] if i in accepted else tokens[ends[i] - 1]
            if i in accepted:
                self._computed[name] = len(sequence.request.prompt) + len(self.output[name]) - 1
            done = len(self.output[name]) == len(known.expected) and (known.reason != "error" or newest == ERROR)
            assert sequence.finish_reason == (known.reason if done else None)
            if done:
                self.reason[name] = known.reason
                assert sequence.stop_reason == (known.expected[-1] if known.reason == "stop" else None)
                self._check_scored(known.wire)

    def _check_scored(self, wire: EngineRequest) -> None:
        """Each prompt position but the last was scored once; a fork's are those of its leader."""
        scored, every = self.scored.get(wire.id, []), list(range(len(wire.prompt) - 1))
        if wire.params.prompt_logprobs is not None:
            assert scored == every or (wire.fork_of and not scored)

    def check(self) -> None:
        """References are those of the page lists, and every other page is free."""
        scheduler, pool = self.scheduler, self.pool
        counted: Counter[int] = Counter(scheduler.tables[scheduler.tables > 0].tolist())
        assert {p: r for p, r in enumerate(pool.references) if r} == dict(counted)
        assert pool.free_blocks + len(counted) == len(pool.references) - 1
        assert scheduler.unfinished == len(self.requests) - len(self.reason)
        assert scheduler.running + scheduler.waiting == scheduler.unfinished
        used = {s.slot for s in self.alive.values() if s.slot >= 0}
        assert len(used) == scheduler.running
        for slot in set(range(self.limits.max_num_seqs)) - used:
            assert not scheduler.tables[:, slot].any()


def _entries(plan: Plan) -> list[Entry]:
    columns = (plan.starts, plan.counts, plan.rows, plan.samples, plan.fed)
    ids = [s.request.id for s in plan.sequences]
    return [Entry(*row) for row in zip(ids, *(c.tolist() for c in columns), strict=True)]


def _hashes(salt: str, tokens: List[int]) -> list[int]:
    """Of every position and all before it."""
    found, past = [], beginning(salt)
    for token in tokens:
        past = extend(past, token)
        found.append(past)
    return found
