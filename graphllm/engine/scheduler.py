"""Scheduler: which sequences get how many tokens in the next step, and which pages they use. No torch in here.

Running sequences go first, those with one token to compute before prompts, so that a long prompt never holds up a
stream. What a step needs of a running sequence lies in arrays by slot, so a step in which all decode is a few array
operations, and Python runs only where something happens: a page is full, a sequence comes or goes.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.pool import BlockPool
from graphllm.engine.request import EngineRequest

_STOPS = 4  # columns the table of stop tokens begins with
_STORED_AT_ONCE = 4  # pages of an output


class QueueFullError(ConfigError):
    """The queue of waiting requests is full; send the request again later."""


class SchedulerLimits(NamedTuple):
    """max_num_rows: sampled rows of one step. max_len: tokens of a sequence. policy: "fcfs" or "priority".

    long_prefill_token_threshold: tokens of one prompt in one step, 0 for no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_rows: int
    max_len: int
    block_size: int
    max_num_queued_reqs: int | None = None
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0


class Sequence:
    """A request in the engine. key: its place in the order, smaller goes first. slot: -1 while it waits.

    drafts: tokens to verify with its next step. digests: of its full pages. scored: prompt positions whose
    log-probabilities were planned. cached_tokens: prompt tokens the prefix cache gave when it was first admitted.
    scheduled: when that was, for those who have a clock; 0 before.
    """

    __slots__ = (
        "cached_tokens", "digests", "drafts", "error", "finish_reason", "key", "output", "preemptions", "request",
        "scheduled", "scored", "slot", "stop_reason",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, key: tuple[int, int]) -> None:
        self.request, self.key, self.slot = request, key, -1
        self.output: list[int] = []
        self.drafts: list[int] = []
        self.digests: list[bytes] = []
        self.scored = self.preemptions = 0
        self.cached_tokens = -1
        self.scheduled = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None

    def __lt__(self, other: Sequence) -> bool:
        return self.key < other.key

    @property
    def length(self) -> int:
        """Known tokens."""
        return len(self.request.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """The ids at those positions: prompt, output, and drafts behind it."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        first, last = max(0, start - len(prompt)), end - len(prompt)
        drafts = self.drafts[max(0, first - len(self.output)) : max(0, last - len(self.output))]
        return prompt[start:] + self.output[first:last] + drafts


class Plan(NamedTuple):
    """A step's work, an entry for each of n sequences, those with one token first.

    starts, counts [n] int32: first position and number of the tokens to compute. rows [n] int32: how many of the last
    of them are sampled from or scored. samples [n] bool: whether the last row gives the sequence's next token. fed [n]
    bool: the first token is still in flight and is taken from the device. epochs [n]: tell at `commit` whether the
    slot is still the sequence's. copies: pages (from, to) to copy first. admitted: sequences new in their slot.
    tables: page lists of all slots, [groups, slots, pages].
    """

    sequences: list[Sequence]
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    samples: np.ndarray
    fed: np.ndarray
    epochs: np.ndarray
    copies: list[tuple[int, int]]
    admitted: list[Sequence]
    tables: np.ndarray


class Commit(NamedTuple):
    """The sequences that got tokens or ended, and the tokens of each. events: which of them began or ended."""

    sequences: list[Sequence]
    tokens: list[list[int]]
    events: list[int]


class Scheduler:
    """groups: attention window of each cache group, 0 sees everything. The pool's pages are this scheduler's alone.

    capacity: tokens of the longest sequence that fits into the cache alone.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, groups: tuple[int, ...] = (0,)) -> None:
        self._limits, self._pool, self._windows = limits, pool, groups
        self.block_size = limits.block_size
        slots, pages = limits.max_num_seqs, -(-limits.max_len // limits.block_size)

        def column() -> np.ndarray:
            return np.zeros(slots, dtype=np.int32)

        self.known, self.computed, self.inflight, self.last_token = column(), column(), column(), column()
        self._prompt, self._limit, self._drafts, self._epoch = column(), column(), column(), column()
        self._hashed, self._due = column(), column()
        self._scoring, self._shared = np.zeros(slots, bool), np.zeros(slots, bool)
        self._held, self._freed = (np.zeros((len(groups), slots), dtype=np.int32) for _ in range(2))
        self.tables = np.zeros((len(groups), slots, pages), dtype=np.int32)
        self._stops = np.full((_STOPS, slots), -1, dtype=np.int32)
        self._by_slot: list[Sequence | None] = [None] * slots
        self._free_slots = list(range(slots - 1, -1, -1))
        self._running: list[Sequence] = []  # in order
        self._order = np.zeros(0, dtype=np.int32)  # their slots
        self._waiting: list[Sequence] = []  # a heap
        self._by_id: dict[str, Sequence] = {}
        self._copies: list[tuple[int, int]] = []
        self._arrivals = itertools.count()
        self.capacity = self._capacity()
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences without one."""
        return len(self._by_id) - len(self._running)

    @property
    def unfinished(self) -> int:
        """All of them."""
        return len(self._by_id)

    def _capacity(self) -> int:
        """Tokens of the longest sequence that fits into the cache alone."""
        pages = len(self._pool.references) - 1
        longest = -(-self._limits.max_len // self.block_size)
        while longest and sum(self._most_pages(longest)) > pages:
            longest -= 1
        return min(longest * self.block_size, self._limits.max_len)

    def _most_pages(self, pages: int) -> list[int]:
        """Pages each group needs at most for a sequence of so many pages of tokens."""
        step = self._limits.max_num_batched_tokens
        return [min(pages, -(-(w + step) // self.block_size) + 1) if w else pages for w in self._windows]

    def check(self, request: EngineRequest) -> None:
        """Raise ConfigError for a request that cannot run, QueueFullError when no more may wait."""
        if request.id in self._by_id:
            raise ConfigError(f"request_id: {request.id!r} is already running; ids must be unique")
        queued = self._limits.max_num_queued_reqs
        # Siblings come or are refused with their first, else one request with many completions would never fit.
        if queued is not None and not request.fork_of and self.waiting >= queued:
            raise QueueFullError(f"the queue is full: {queued} requests are waiting; send the request again later")
        length = min(len(request.prompt) + request.limit, self._limits.max_len)
        if length > self.capacity:
            raise ConfigError(
                f"request {request.id}: {len(request.prompt)} prompt tokens and up to {request.limit} of output are "
                f"more than the {self.capacity} that the cache holds; shorten it, lower max_tokens, or give the cache "
                "more memory"
            )

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises as `check` does."""
        self.check(request)
        priority = request.priority if self._limits.policy == "priority" else 0
        sequence = Sequence(request, (priority, next(self._arrivals)))
        self._by_id[request.id] = sequence
        heapq.heappush(self._waiting, sequence)

    def abort(self, ids: Iterable[str]) -> list[Sequence]:
        """Drop sequences; what is in flight for them is ignored when it comes. Those that there were."""
        dropped = []
        for id in ids:
            if (sequence := self._by_id.get(id)) is not None:
                self._finish(sequence, "abort")
                dropped.append(sequence)
        return dropped

    def fail(self, sequence: Sequence, error: str) -> None:
        """End a sequence with an error."""
        sequence.error = error
        self.end(sequence, "error")

    def end(self, sequence: Sequence, reason: str) -> None:
        """End a sequence for a reason that only the caller knows."""
        if sequence.finish_reason is None:
            self._finish(sequence, reason)
        else:
            sequence.finish_reason = reason

    def propose(self, sequence: Sequence, drafts: list[int]) -> None:
        """Have these tokens verified with the sequence's next step, which waits until nothing of it is in flight.

        They are a hint: those that cannot be kept or do not fit in a step are dropped, and all of them for a sequence
        that waits or is still computing what is known.
        """
        slot = sequence.slot
        if slot < 0 or self.computed[slot] < self.known[slot] + self.inflight[slot] - 1:
            return
        room = int(self._limit[slot] - self.known[slot] - self.inflight[slot]) - 1
        most = min(self._limits.max_num_batched_tokens, self._limits.max_num_rows) - 1
        sequence.drafts = drafts[: max(0, min(room, most))]
        self._drafts[slot] = len(sequence.drafts)

    def next(self) -> Plan | None:
        """The next step's work; None when nothing can be done before the step in flight has ended."""
        entries: list[tuple[np.ndarray, np.ndarray]] = []  # slots, counts
        self._copies = []
        admitted: list[Sequence] = []
        budget, rows, preempted = self._limits.max_num_batched_tokens, self._limits.max_num_rows, self.preemptions
        # Over all slots, which is faster than picking the used ones: a free one has nothing to do.
        known = self.known + self.inflight
        todo = known - self.computed
        ready = (known < self._limit) | (self.computed < self._prompt)
        if np.count_nonzero(self._drafts):
            ready &= (self._drafts == 0) | (self.inflight == 0)
            decode = ready & (todo == 1)
            todo += self._drafts
        else:
            decode = ready & (todo == 1)
        ready &= todo > 0
        chosen = self._with_pages(decode, self.computed + todo)
        if len(chosen):
            counts = todo[chosen]
            if (spent := int(counts.sum())) > min(budget, rows):
                fits = np.cumsum(counts) <= min(budget, rows)
                chosen, counts = chosen[fits], counts[fits]
                spent = int(counts.sum())
            entries.append((chosen, counts))
            budget, rows = budget - spent, rows - spent
        if np.count_nonzero(ready) > np.count_nonzero(decode):
            planned = set(chosen.tolist())
            for slot in self._order[(ready & ~decode)[self._order]].tolist():
                sequence = self._by_slot[slot]
                if budget <= 0 or sequence is None:
                    continue
                count = self._chunk(sequence, slot, budget, rows)
                count = self._pages_for_chunk(sequence, count, planned)
                if count:
                    entries.append((np.array([slot], dtype=np.int32), np.array([count], dtype=np.int32)))
                    planned.add(slot)
                    budget -= count
                    rows -= self._rows_of(sequence, slot, count)
        if self._waiting and self.preemptions == preempted:
            self._admit(entries, admitted, budget, rows)
        if not entries:
            return None
        slots, counts = entries[0]
        if len(entries) > 1:
            slots, counts = (np.concatenate(parts, dtype=np.int32) for parts in zip(*entries, strict=True))
        return self._plan(slots, counts, admitted)

    def _plan(self, slots: np.ndarray, counts: np.ndarray, admitted: list[Sequence]) -> Plan:
        starts, inflight, known = self.computed[slots], self.inflight[slots], self.known[slots]
        ends = starts + counts
        due = known + inflight
        if np.count_nonzero(self._drafts):
            drafts = self._drafts[slots]
            samples = ends == due + drafts
            rows = samples * (1 + drafts)
            inflight += samples & (drafts == 0)
        else:
            samples = ends == due
            rows = samples.astype(np.int32)
            inflight += samples
        by_slot = self._by_slot
        sequences: list[Sequence] = [by_slot[s] for s in slots.tolist()]
        if np.count_nonzero(self._scoring):
            for i in np.flatnonzero(self._scoring[slots]):
                rows[i] = self._rows_of(sequences[i], int(slots[i]), int(counts[i]))
                sequences[i].scored = max(sequences[i].scored, int(min(ends[i], self._prompt[slots[i]] - 1)))
        fed = starts >= known
        self.computed[slots] = ends
        self.inflight[slots] = inflight
        epochs = self._epoch[slots]
        return Plan(sequences, slots, starts, counts, rows, samples, fed, epochs, self._copies, admitted, self.tables)

    def _rows_of(self, sequence: Sequence, slot: int, count: int) -> int:
        """Logit rows of a chunk: the last one if it is sampled from, and prompt positions yet to be scored."""
        start = int(self.computed[slot])
        end = start + count
        rows = int(end == self.known[slot] + self.inflight[slot])
        if self._scoring[slot]:
            rows += max(0, min(end, int(self._prompt[slot]) - 1) - max(start, sequence.scored))
        return rows

    def _chunk(self, sequence: Sequence, slot: int, budget: int, rows: int) -> int:
        """Tokens of a prompt that fit into what is left of a step."""
        count = min(int(self.known[slot] - self.computed[slot]), budget)
        if self._limits.long_prefill_token_threshold:
            count = min(count, self._limits.long_prefill_token_threshold)
        while count and self._rows_of(sequence, slot, count) > rows:
            count -= min(count, max(1, self._rows_of(sequence, slot, count) - rows))
        return count

    def _with_pages(self, decode: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The decoding slots, in order, that have the pages for their next tokens; others were preempted. decode, ends:
        of all slots, whether they decode and how far their tokens then go."""
        slots = self._order[decode[self._order]]
        events = (ends > self._held[0] * self.block_size) | self._shared
        for g, window in enumerate(self._windows):
            if window:
                events |= (np.maximum(self.computed - window + 1, 0) // self.block_size) > self._freed[g]
        events &= decode
        if not np.count_nonzero(events):
            return slots
        before = self.preemptions
        at = slots[events[slots]]
        last = (ends[at] - 1) // self.block_size
        if self._add_pages(at, last):
            return slots
        for slot, pages in zip(at.tolist(), (last + 1).tolist(), strict=True):
            sequence = self._by_slot[slot]
            if sequence is None:  # preempted for one before it
                continue
            while not self._extend(sequence, pages):
                victim = self._running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
        if self.preemptions == before:
            return slots
        return slots[[self._by_slot[s] is not None for s in slots.tolist()]]

    def _add_pages(self, slots: np.ndarray, last: np.ndarray) -> bool:
        """The usual case at once: one page more for each slot, and there are enough. False, and nothing done, if
        not."""
        if self._windows != (0,) or len(slots) > self._pool.free_blocks:
            return False
        held = self._held[0, slots]
        if (last != held).any() or self._shared[slots].any():
            return False
        self.tables[0, slots, held] = [self._pool.allocate() for _ in range(len(slots))]
        self._held[0, slots] += 1
        return True

    def _pages_for_chunk(self, sequence: Sequence, count: int, planned: set[int]) -> int:
        """Tokens of a running prompt's chunk for which there are pages. Others not in the plan yet are preempted for
        them."""
        start = int(self.computed[sequence.slot])
        while count:
            if self._extend(sequence, -(-(start + count) // self.block_size)):
                return count
            victim = next((s for s in reversed(self._running) if s.slot not in planned), None)
            if victim is None or victim is sequence:
                # What others hold of the step comes back with them; if nothing else runs, it starts anew.
                if victim is sequence and not planned and len(self._running) > 1:
                    self._preempt(sequence)
                return 0
            self._preempt(victim)
        return 0

    def _extend(self, sequence: Sequence, pages: int) -> bool:
        """Make every page list so long, give back what lies behind windows, and copy a shared page that is to be
        written; False when pages are missing."""
        slot = sequence.slot
        for g, window in enumerate(self._windows):
            if window:
                first = self._first_seen(int(self.computed[slot]), window)
                self._drop_before(g, slot, first)
        need = sum(max(0, pages - int(h)) for h in self._held[:, slot])
        if self._shared[slot]:
            need += len(self._windows)
        if need > self._pool.free_blocks:
            return False
        for g in range(len(self._windows)):
            for i in range(int(self._held[g, slot]), pages):
                self.tables[g, slot, i] = self._pool.allocate()
            self._held[g, slot] = max(self._held[g, slot], pages)
        if self._shared[slot]:
            self._copy_shared(slot)
        return True

    def _drop_before(self, g: int, slot: int, first: int) -> None:
        freed = int(self._freed[g, slot])
        if first > freed:
            gone = self.tables[g, slot, freed:first]
            self._pool.release([p for p in reversed(gone.tolist()) if p])
            gone[:] = 0
            self._freed[g, slot] = first

    def _copy_shared(self, slot: int) -> None:
        """Replace the page that is written next, where others hold or may find it, by a copy."""
        at = int(self.computed[slot]) // self.block_size
        for g in range(len(self._windows)):
            page = int(self.tables[g, slot, at])
            if page and not self._pool.exclusive(page):
                made = self._pool.allocate()
                self._copies.append((page, made))
                self._pool.release([page])
                self.tables[g, slot, at] = made
        self._shared[slot] = False

    def _admit(
        self, entries: list[tuple[np.ndarray, np.ndarray]], admitted: list[Sequence], budget: int, rows: int
    ) -> None:
        held_back = []
        while self._waiting and self._free_slots and budget > 0 and rows > 0:
            sequence = heapq.heappop(self._waiting)
            if sequence.finish_reason is not None:
                continue
            # One that has begun to score its prompt by itself goes on by itself.
            alone = sequence.output or 0 < sequence.scored < len(sequence.request.prompt) - 1
            leader = None if alone else self._by_id.get(sequence.request.fork_of)
            if leader is not None and not self._ready_to_fork(leader):
                held_back.append(sequence)
                continue
            if leader is not None and not self._has_window(leader):
                leader = None
            if not self._enter(sequence, leader):
                heapq.heappush(self._waiting, sequence)
                break
            slot = sequence.slot
            count = self._chunk(sequence, slot, budget, rows)
            if not count or not self._extend(sequence, -(-(int(self.computed[slot]) + count) // self.block_size)):
                self._leave(sequence)
                heapq.heappush(self._waiting, sequence)
                break
            self._count_hits(sequence)
            admitted.append(sequence)
            entries.append((np.array([slot], dtype=np.int32), np.array([count], dtype=np.int32)))
            budget -= count
            rows -= self._rows_of(sequence, slot, count)
        for sequence in held_back:
            heapq.heappush(self._waiting, sequence)

    def _ready_to_fork(self, leader: Sequence) -> bool:
        """Whether a leader's whole prompt is in the cache, or in a step that comes before; one that waits comes
        first."""
        return leader.slot >= 0 and bool(self.computed[leader.slot] >= self._prompt[leader.slot])

    def _first_seen(self, position: int, window: int) -> int:
        """The first page that the token at a position sees through a window."""
        return max(0, position - window + 1) // self.block_size

    def _has_window(self, leader: Sequence) -> bool:
        """Whether a leader still holds the pages that the last token of its prompt sees."""
        last = int(self._prompt[leader.slot]) - 1
        return all(
            not w or self._freed[g, leader.slot] <= self._first_seen(last, w) for g, w in enumerate(self._windows)
        )

    def _enter(self, sequence: Sequence, leader: Sequence | None) -> bool:
        """Give a sequence a slot and the pages it can share; False when the pages for the rest are not free."""
        request, length = sequence.request, sequence.length
        shared: list[list[int]]
        if leader is not None:
            blocks, computed = -(-length // self.block_size), length - 1
            shared = [self.tables[g, leader.slot, :blocks].tolist() for g in range(len(self._windows))]
        else:
            shared = self._find(sequence)
            blocks = len(shared[0])
            computed = blocks * self.block_size
        missing = sum(m - min(blocks, m) for m in self._most_pages(-(-(length + 1) // self.block_size)))
        unheld = sum(1 for pages in shared for p in pages if p and self._pool.references[p] == 0)
        if missing + unheld + (len(self._windows) if leader else 0) > self._pool.free_blocks:
            return False
        slot = sequence.slot = self._free_slots.pop()
        self._by_slot[slot] = sequence
        self._epoch[slot] += 1
        for g, pages in enumerate(shared):
            for page in pages:
                if page:
                    self._pool.hold(page)
            self.tables[g, slot, :blocks] = pages
            self._held[g, slot] = blocks
            self._freed[g, slot] = next((i for i, p in enumerate(pages) if p), blocks)
        self.known[slot], self.computed[slot], self.inflight[slot] = length, computed, 0
        self.last_token[slot] = sequence.output[-1] if sequence.output else request.prompt[-1]
        self._prompt[slot] = len(request.prompt)
        self._limit[slot] = min(len(request.prompt) + request.limit, self._limits.max_len)
        self._drafts[slot], self._hashed[slot] = 0, computed // self.block_size
        self._set_due(slot)
        self._scoring[slot] = request.params.prompt_logprobs is not None
        self._shared[slot] = leader is not None
        stops = request.stop_ids
        if len(stops) > len(self._stops):
            more = np.full((len(stops) - len(self._stops), len(self._by_slot)), -1, dtype=np.int32)
            self._stops = np.concatenate([self._stops, more])
        self._stops[:, slot] = -1
        self._stops[: len(stops), slot] = stops
        place = bisect.bisect(self._running, sequence)
        self._running.insert(place, sequence)
        self._order = np.insert(self._order, place, slot)
        return True

    def _find(self, sequence: Sequence) -> list[list[int]]:
        """Pages of the longest beginning that the prefix cache holds for every group, at least one token short."""
        request = sequence.request
        none: list[list[int]] = [[] for _ in self._windows]
        scoring = request.params.prompt_logprobs is not None and sequence.scored < len(request.prompt) - 1
        if not self._pool.caching or scoring or request.params.skip_reading_prefix_cache:
            return none
        blocks = (sequence.length - 1) // self.block_size
        self._digest(sequence, blocks)
        found = [[self._pool.find(g, d) for d in sequence.digests[:blocks]] for g in range(len(self._windows))]
        size = blocks
        while size:
            best = min(self._usable(found[g], w, size) for g, w in enumerate(self._windows))
            if best == size:
                break
            size = best
        out = []
        for pages, window in zip(found, self._windows, strict=True):
            first = self._first_seen(size * self.block_size, window) if window else 0
            out.append([0] * min(first, size) + pages[first:size])
        return out

    def _usable(self, pages: list[int], window: int, size: int) -> int:
        """The largest number of blocks up to ``size`` whose end has all the pages that the window sees."""
        if not window:
            return next((i for i, p in enumerate(pages[:size]) if not p), size)
        while size:
            first = self._first_seen(size * self.block_size, window)
            hole = next((i for i in range(size - 1, first - 1, -1) if not pages[i]), None)
            if hole is None:
                return size
            size = hole
        return 0

    def _digest(self, sequence: Sequence, blocks: int) -> None:
        """Extend the sequence's chain of digests to that many full pages."""
        have = len(sequence.digests)
        if have >= blocks:
            return
        size = 4 * self.block_size
        ids = array("i", sequence.tokens(have * self.block_size, blocks * self.block_size)).tobytes()
        before = sequence.digests[-1] if have else b""
        for at in range(0, len(ids), size):
            before = self._pool.digest(before, ids[at : at + size], sequence.request.cache_salt)
            sequence.digests.append(before)

    def _count_hits(self, sequence: Sequence) -> None:
        if sequence.cached_tokens < 0:  # one that was preempted finds its own pages again
            sequence.cached_tokens = int(self.computed[sequence.slot])
            self.prefix_queries += sequence.length
            self.prefix_hits += sequence.cached_tokens

    def commit(self, plan: Plan, tokens: np.ndarray, accepted: Mapping[int, list[int]] | None = None) -> Commit:
        """Take a step's result.

        tokens [R] int32: of the plan's rows in order; negative where none could be chosen, which ends the sequence with
        an error. accepted: for entries with drafts, by index, the tokens that are kept, one at least. Sequences that
        are gone or were preempted since are passed over.
        """
        slots, accepted = plan.slots, accepted or {}
        live = self._epoch[slots] == plan.epochs
        got = plan.samples & live
        if not accepted and len(tokens) == len(slots) == np.count_nonzero(got):
            at, chosen, new, sequences = np.arange(len(slots)), slots, tokens, list(plan.sequences)
        else:
            got[list(accepted)] = False
            at = np.flatnonzero(got)
            chosen, new = slots[at], tokens[(np.cumsum(plan.rows) - 1)[at]]
            sequences = [plan.sequences[i] for i in at.tolist()]
        known = self.known[chosen] + 1
        self.inflight[chosen] -= 1
        self.known[chosen] = known
        self.last_token[chosen] = new
        failed = new < 0
        stopped = (self._stops[:, chosen] == new).any(axis=0)
        ended = stopped | failed | (known >= self._limit[chosen])
        events = (ended | (known == self._prompt[chosen] + 1)).nonzero()[0].tolist()
        given = new.tolist()
        for sequence, token in zip(sequences, given, strict=True):
            sequence.output.append(token)
        news = [[token] for token in given]
        ends: list[tuple[Sequence, str]] = []
        for i in events:
            if not ended[i]:
                continue
            if failed[i]:
                sequences[i].output.pop()
                news[i] = []
                live[at[i]] = False  # what such a step has computed is nothing to keep
            elif stopped[i]:
                sequences[i].stop_reason = given[i]
            ends.append((sequences[i], "error" if failed[i] else "stop" if stopped[i] else "length"))
        for i, kept in accepted.items():
            if live[i]:
                at = np.append(at, i)
                sequences.append(plan.sequences[i])
                news.append(self._accept(plan.sequences[i], kept, ends))
        if accepted:
            order = np.argsort(at).tolist()
            sequences, news = [sequences[i] for i in order], [news[i] for i in order]
            events = list(range(len(news)))
        self._store_due(plan, live, bool(accepted))
        for sequence, reason in ends:
            if reason != "error":
                self._store(sequence)
            self._finish(sequence, reason)
        return Commit(sequences, news, events)

    def _accept(self, sequence: Sequence, kept: list[int], ends: list[tuple[Sequence, str]]) -> list[int]:
        """Take the verified tokens of a sequence with drafts, up to a stop token or its limit, where it ends."""
        slot, request = sequence.slot, sequence.request
        news: list[int] = []
        for token in kept:
            if token < 0:
                ends.append((sequence, "error"))
                break
            news.append(token)
            if token in request.stop_ids:
                sequence.stop_reason = token
                ends.append((sequence, "stop"))
                break
            if self.known[slot] + len(news) >= self._limit[slot]:
                ends.append((sequence, "length"))
                break
        sequence.output += news
        sequence.drafts = []
        self._drafts[slot] = 0
        self.known[slot] += len(news)
        if news:
            self.last_token[slot] = news[-1]
        self.computed[slot] = self.known[slot] - 1
        return news

    def _store_due(self, plan: Plan, live: np.ndarray, drafted: bool) -> None:
        """Make full pages findable: a prompt's at once, an output's several at a time, which costs less."""
        if not self._pool.caching:
            return
        slots, done = plan.slots, plan.starts + plan.counts
        if drafted:
            done = np.minimum(done, self.known[slots] - 1)
        for slot in slots[(done >= self._due[slots]) & live].tolist():
            sequence = self._by_slot[slot]
            assert sequence is not None
            self._store(sequence)

    def _store(self, sequence: Sequence) -> None:
        """Make findable what a sequence has computed, also in the step in flight: whoever finds it reads it later."""
        slot = sequence.slot
        if not self._pool.caching:
            return
        first, blocks = int(self._hashed[slot]), int(min(self.computed[slot], self.known[slot])) // self.block_size
        if blocks > first:
            self._digest(sequence, blocks)
            for g in range(len(self._windows)):
                for block, page in enumerate(self.tables[g, slot, first:blocks].tolist(), first):
                    if page:
                        self._pool.store(page, g, sequence.digests[block])
            self._hashed[slot] = blocks
        self._set_due(slot)

    def _set_due(self, slot: int) -> None:
        """When the sequence's next pages are stored, in tokens computed."""
        blocks = int(self._hashed[slot])
        more = 1 if (blocks + 1) * self.block_size <= self._prompt[slot] else _STORED_AT_ONCE
        self._due[slot] = (blocks + more) * self.block_size

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages; it waits, in its old place, to be computed again. What is in flight is lost."""
        self.preemptions += 1
        sequence.preemptions += 1
        sequence.drafts = []
        self._store(sequence)  # with luck some of it is still there then
        self._leave(sequence)
        heapq.heappush(self._waiting, sequence)

    def _leave(self, sequence: Sequence) -> None:
        slot, sequence.slot = sequence.slot, -1
        for g in range(len(self._windows)):
            held = int(self._held[g, slot])
            self._pool.release([p for p in reversed(self.tables[g, slot, :held].tolist()) if p])
            self.tables[g, slot, :held] = 0
            self._held[g, slot] = self._freed[g, slot] = 0
        self.known[slot] = self.computed[slot] = self.inflight[slot] = self._drafts[slot] = 0
        self._limit[slot] = self._prompt[slot] = 0
        self._scoring[slot] = self._shared[slot] = False
        self._by_slot[slot] = None
        self._epoch[slot] += 1
        self._free_slots.append(slot)
        self._running.remove(sequence)
        self._order = self._order[self._order != slot]

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        del self._by_id[sequence.request.id]
        if sequence.slot >= 0:
            self._leave(sequence)
