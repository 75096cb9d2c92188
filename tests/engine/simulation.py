"""A simulated model and device under the scheduler, driven as the engine core drives the real ones.

The cache is a dict from (block, offset) to what is written there: a hash of the salt, adapter and items and of all
token ids up to that position. So every step can check that each position a sequence sees leads to exactly its own past,
whatever was shared, copied, evicted or rolled back. A recurrent state, by slot, is the hash of all that it has taken
in, and a snapshot is a copy of it. The next token is a function of that hash, so what a request gets alone is known.
Drafts are accepted on the device, which corrects what the host counted too high.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from graphllm.config import TierConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.cache.cache_exchange import CacheExchange, Exported
from graphllm.engine.cache.item_cache import ItemCache
from graphllm.engine.parts.tiers import Tiers
from graphllm.engine.requests.request import Adapter, EngineRequest, Item
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.adapter_table import AdapterTable
from graphllm.engine.schedule.item_rows import ItemRows
from graphllm.engine.schedule.results import Commit
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.schedule.scheduler_output import DraftResults, SchedulerLimits, SchedulerOutput
from graphllm.engine.schedule.verification import DraftPlanner
from graphllm.engine.tiers.further_tier import FurtherTier
from graphllm.program.schema import CacheGroup, CacheLayout
from tests.engine.tiers.simulated import SimulatedRank, simulated_tiers

VOCAB = 4  # sampled tokens are below
ERROR = -1


@dataclass(frozen=True)
class Entry:
    """An entry of a scheduler's output."""

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


class _Flight(NamedTuple):
    """A step whose result the host has not taken. num_kept: of each entry, where it verifies."""

    output: SchedulerOutput
    ids: list[str]
    tokens: np.ndarray
    num_kept: np.ndarray | None


class Content(NamedTuple):
    """An exported block or snapshot, and what is in it."""

    entry: Exported
    content: Any


def extend(before: int, token: int) -> int:
    """Hash of a token and all before it."""
    return hash((before, token))


def beginning(request: EngineRequest) -> int:
    """Hash of nothing. Items that stand in the prompt count with their position (see `seen`)."""
    everywhere = [i.content_hash for i in request.items if i.position < 0]
    adapter = "" if request.adapter is None else request.adapter.digest
    return zlib.crc32(repr((request.cache_salt, adapter, everywhere)).encode())


def seen(request: EngineRequest, tokens: List[int]) -> list[int]:
    """What the model sees at each position: the token, or the item's row in its place."""
    found = list(tokens)
    for item in request.items:
        if item.position >= 0:
            for i in range(item.length):
                if item.position + i < len(found):
                    found[item.position + i] = zlib.crc32(f"{item.content_hash} {i}".encode())
    return found


def sample(seed: int, past: int) -> int:
    """The token behind that past."""
    return hash((seed, past, 5)) % VOCAB


def continuation(request: EngineRequest, known: List[int], count: int) -> list[int]:
    """The next tokens of a sequence, whatever would end it."""
    past = beginning(request)
    for token in seen(request, known):
        past = extend(past, token)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(sample(request.seed, past))
        past = extend(past, tokens[-1])
    return tokens


def alone(request: EngineRequest, error_at: int = -1) -> tuple[list[int], str]:
    """The tokens of a request and why it ends. error_at: output index at which no token can be chosen."""
    if not request.limit:
        return [], "stop"
    tokens: list[int] = []
    for i, token in enumerate(continuation(request, request.prompt, request.limit)):
        if i == error_at:
            return tokens, "error"
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, "stop"
    return tokens, "length"


def request(id: str, prompt: List[int], limit: int = 4, **fields: Any) -> EngineRequest:
    """A request. scored: with prompt_logprobs. unread: with skip_reading_prefix_cache. adapter: number of one, 0 for
    none."""
    scored, unread = fields.pop("scored", False), fields.pop("unread", None)
    params = SamplingParams(
        max_tokens=max(limit, 1), prompt_logprobs=1 if scored else None, skip_reading_prefix_cache=unread
    )
    if isinstance(number := fields.pop("adapter", 0), int):
        number = adapter(number)
    given: dict[str, Any] = {"stop_ids": [], "seed": 0, "adapter": number} | fields
    return EngineRequest(id=id, prompt=list(prompt), params=params, limit=limit, **given)


def adapter(number: int) -> Adapter | None:
    """The adapter of that number."""
    return Adapter(f"{number}", "", f"digest {number}") if number else None


def layout(windows: List[int], num_blocks: int, block_sizes: List[int], **fields: Any) -> CacheLayout:
    """Groups with those windows (0: none) and block sizes."""
    groups = [
        CacheGroup("window" if window else "full", window, size)
        for window, size in zip(windows, block_sizes, strict=True)
    ]
    return CacheLayout(tuple(groups), num_blocks, **fields)


class Simulation:
    """A scheduler and a device. Each step checks what must hold, whatever the requests."""

    def __init__(
        self, limits: SchedulerLimits, pages: int, windows: tuple[int, ...] = (0,), caching: bool = True,
        block_sizes: tuple[int, ...] | None = None, device_drafts: bool = False, tiers: TierConfig | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        """block_sizes: of the groups, by default all that of the limits. tiers: each entry of host memory takes a byte.
        fields: of the layout."""
        self.limits, self.windows = limits, windows
        self.block_sizes = block_sizes or (limits.block_size,) * len(windows)
        self.layout = layout(windows, pages, self.block_sizes, **fields)
        self.scheduler = Scheduler(limits, self.layout, caching, secret="s")
        self.adapters = AdapterTable(self.layout.max_adapters)
        self.items = ItemRows(ItemCache(self.layout.item_tokens, caching))
        self.scheduler.admission.resources = [self.adapters, self.items]
        self.scheduler.verification = DraftPlanner(self.layout, limits, self.scheduler.requests, device_drafts)
        self.pool = self.scheduler.cache.pool
        self.requests: dict[str, Request] = {}
        self.output: dict[str, list[int]] = {}
        self.reason: dict[str, str] = {}
        self.alive: dict[str, RequestState] = {}  # as the outputs name them
        self.scored: dict[str, list[int]] = {}  # prompt positions, as planned
        self.copied: list[tuple[int, int]] = []  # blocks, since the beginning
        self.encoded: list[str] = []  # items, since the beginning
        self.verified: list[tuple[int, int]] = []  # query_len and tokens kept, of each verified sequence
        self.right = 0  # device drafts: so many of the first are right
        self._computed: dict[str, int] = {}  # on the device
        self._known: dict[str, list[int]] = {}  # on the device: all tokens, sampled ones included
        self._unsure: dict[str, int] = {}  # by how much the host counts too high
        self._cache: dict[tuple[int, int], tuple[int, int]] = {}
        self._states: dict[int, int] = {}  # recurrent, by slot
        self._snapshots: dict[int, int] = {}
        self._rows: dict[int, tuple[str, int]] = {}  # of encoded items: content and index
        self._in_flight: _Flight | None = None
        self.rank = SimulatedRank(self._cache, self._snapshots, max(self.block_sizes, default=0))
        self.tiers: Tiers | None = None
        if tiers is not None and self.scheduler.cache.caching:
            self.use_tiers(tiers)
        self._tables = [""] * (self.layout.max_adapters + 1)  # of adapters, on the device: whose each entry is
        self._read: list[str] = []  # adapters in memory, as many as there are entries and one more

    def use_tiers(self, config: TierConfig, further: List[FurtherTier] = ()) -> None:
        """Keep what leaves the device; before the first request."""
        self.tiers = simulated_tiers(self.rank, self.scheduler, self.limits, self.layout, config, further)
        self.scheduler.admission.resources = [self.adapters, self.items, self.tiers.resource]

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
            if self.tiers is not None:
                self.tiers.end(id, ())
        self.check()

    def step(self) -> list[Entry]:
        """One turn of the loop: plan and start a step, then take the result of the one before."""
        streams = self.decoding()
        preemptions = self.scheduler.preemptions
        wanted = [a.digest for a in self.adapters.wanted]
        assert len(wanted) <= self.layout.max_adapters
        read = [d for d in self._read if d not in wanted] + wanted
        self._read = read[-(self.layout.max_adapters + 1) :]
        self.adapters.in_memory = set(self._read)
        if self.tiers is not None:
            self.rank.advance()
            assert not list(self.tiers.gather(idle=False))
        output = self.scheduler.next()
        if self.tiers is not None:
            self.tiers.planned(output)
        assert output is None or not output.admitted or self.scheduler.preemptions == preemptions
        self._check_streams(streams, output)
        started = None if output is None else self._start(output)
        if self.tiers is not None and output is not None:
            list(self.tiers.started(None))  # type: ignore[arg-type]
        entries = [] if output is None else _entries(output)
        self.check(output)
        if self._in_flight is not None:
            flight = self._in_flight
            self._take(self.scheduler.commit(flight.output, flight.tokens, DraftResults(flight.num_kept)), flight)
            self.check(output)
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
        """Whether requests run or wait, or a step or a copy to the device is in flight."""
        copying = self.tiers is not None and self.tiers.busy
        return self.scheduler.unfinished > 0 or self._in_flight is not None or copying

    def past(self, id: str) -> list[int]:
        """A request's tokens, those in flight included."""
        if id in self.alive and self.alive[id].slot >= 0:
            return list(self._known[id])
        return [*self.requests[id].wire.prompt, *self.output[id]]

    def decoding(self) -> list[str]:
        """Running requests with a token to sample, in order; those may not be held up."""
        t, found = self.scheduler.requests, []
        for state in sorted(s for id, s in self.alive.items() if s.slot >= 0 and id not in self.reason):
            id, wire, counted = state.request.id, state.request, int(t.num_in_flight[state.slot])
            ahead = self._computed[id] == len(self._known[id]) - 1
            if ahead and t.num_tokens[state.slot] + counted < len(wire.prompt) + wire.limit:
                found.append(id)
        return found

    def export(self, wire: EngineRequest) -> list[Content]:
        """What the cache has of a request's prompt."""
        found = []
        for entry in CacheExchange(self.scheduler.cache).export(wire):
            if entry.group < 0:
                found.append(Content(entry, self._snapshots[entry.number]))
                continue
            size = self.block_sizes[entry.group]
            found.append(Content(entry, [self._cache[entry.number, o] for o in range(size)]))
        return found

    def adopt(self, contents: List[Content]) -> int:
        """Bring exported contents in; how many there was no need or room for."""
        cache, made = self.scheduler.cache, []
        for (group, digest, _), content in contents:
            number = CacheExchange(cache).adopt(group, digest)
            if number < 0:
                continue
            made.append((group, number))
            if group < 0:
                self._snapshots[number] = content
            else:
                self._cache |= {(number, offset): value for offset, value in enumerate(content)}
        for group, number in reversed(made):
            CacheExchange(cache).settle(group, number)
        self.check()
        return len(contents) - len(made)

    def _check_streams(self, wanted: list[str], output: SchedulerOutput | None) -> None:
        planned = [] if output is None else [s.request.id for s in output.requests]
        room = min(self.limits.max_num_batched_tokens, self.limits.max_num_rows)
        for id in wanted:
            if self.alive[id].slot >= 0:  # not preempted
                room -= 1
                assert id in planned or room < 0, "a stream is held up"

    def _start(self, output: SchedulerOutput) -> _Flight:
        """What the device does with a step; checks that it may."""
        limits, n, v = self.limits, len(output.requests), output.verified
        assert n == len(set(output.slots.tolist())) > 0
        assert [s.slot for s in output.requests] == output.slots.tolist()
        assert 0 < output.counts.sum() <= limits.max_num_batched_tokens
        assert output.rows.sum() <= limits.max_num_rows
        assert self.scheduler.running <= limits.max_num_seqs
        assert (v > 0) == (output.query_len > 1)
        assert not v or output.query_len in self.layout.query_lens
        assert (output.counts[:v] == output.query_len).all()
        assert (output.rows[:v] == output.query_len).all()
        self._before(output)
        hashes = []
        starts = []
        for i, (state, entry) in enumerate(zip(output.requests, _entries(output), strict=True)):
            id = state.request.id
            assert id not in self.reason, "a request that ended is planned"
            unsure = self._unsure.get(id, 0)
            assert unsure == 0 or (output.pending is not None and output.pending[i])
            start = entry.start - unsure
            starts.append(start)
            assert start == self._computed[id]
            known, q = self._known[id], _query_len(output, i)
            assert entry.fed == (start >= len(state.request.prompt) + len(self.output[id]))
            assert entry.count > 0
            assert start + entry.count <= len(known) + q - 1
            assert entry.samples == (start + entry.count == len(known) + q - 1)
            if q > 1:
                assert start == len(known) - 1 >= len(state.request.prompt)
            if q > 1:
                assert entry.start + entry.count < self.limits.max_len
            elif entry.samples and state.request.limit:
                most = len(state.request.prompt) + state.request.limit
                assert entry.start + entry.count < min(most, self.limits.max_len)
            threshold = limits.long_prefill_token_threshold
            if not self.layout.stateless:
                assert entry.count <= (threshold or entry.count) or q > 1
            else:  # nothing is kept between steps
                assert entry.samples
                assert start == 0 or start >= len(state.request.prompt)
            drafts = self._drafts(output, i)
            hashes.append(_hashes(state.request, known + drafts))
            self._check_past(output, i, hashes[i], start, start)
            self._check_items(state, start, start + entry.count)
            self._score(entry, state, q)
        for i, state in enumerate(output.requests):
            start, end = starts[i], starts[i] + int(output.counts[i])
            for g, size in enumerate(self.block_sizes):
                for position in range(start, end):
                    at = int(output.tables[g][state.slot, position // size])
                    assert at
                    assert self.pool.exclusive(at), "writes a block that others see"
                    self._cache[at, position % size] = (g, hashes[i][position])
            if self.layout.recurrent:
                past = hashes[i][start - 1] if start else beginning(state.request)
                assert self._states.get(state.slot) == past, "a recurrent state of something else"
        for i in range(n):
            self._check_past(output, i, hashes[i], starts[i], starts[i] + int(output.counts[i]))
        flight = self._sample(output, starts)
        for i, state in enumerate(output.requests):
            if self.layout.recurrent:
                computed = self._computed[state.request.id]
                self._states[state.slot] = hashes[i][computed - 1]
        exported = {}
        for i, entry in enumerate([] if output.exports is None else output.exports.tolist()):
            if entry >= 0:
                border = (int(output.counts[i]) - 1) // self.layout.border * self.layout.border
                assert entry in self.layout.exports
                assert entry not in exported
                assert border > 0
                exported[entry] = hashes[i][starts[i] + border - 1]
        for slot, snapshot in output.snapshot_saves:
            (snapshots,) = self.scheduler.cache.states.pools
            assert snapshots.pool.exclusive(snapshot + 1), "writes a snapshot that others see"
            self._snapshots[snapshot] = exported.pop(slot) if slot in exported else self._states[slot]
        assert not exported
        return flight

    def _before(self, output: SchedulerOutput) -> None:
        """Copies, resets, loads, encodes, and requests that enter."""
        limits = self.limits
        self.copied += output.copies
        for entry, digest in self.adapters.writes():
            assert digest in self._read, "writes tables that are not there"
            self._tables[entry] = digest
        t = self.scheduler.requests
        for state in t.running:
            own = "" if state.request.adapter is None else state.request.adapter.digest
            assert self._tables[t.adapter_id[state.slot]] == own, "a request has the tables of another adapter"
        for source, target in output.copies:
            assert source != target
            for offset in range(max(self.block_sizes)):
                if (source, offset) in self._cache:
                    self._cache[target, offset] = self._cache[source, offset]
                else:
                    self._cache.pop((target, offset), None)
        for state, start in zip(output.requests, output.starts.tolist(), strict=True):
            if state in output.admitted:
                id = state.request.id
                self.alive[id] = state
                self._computed[id], self._unsure[id] = start, 0
                self._known[id] = [*state.request.prompt, *self.output[id]]
                assert limits.max_len >= len(self._known[id])
                if self.layout.recurrent:
                    assert (state.slot in output.resets) == (start == 0)
                    assert (state.slot in [s for _, s in output.snapshot_loads]) == (start > 0)
                    self._states[state.slot] = beginning(state.request)
        for snapshot, slot in output.snapshot_loads:
            self._states[slot] = self._snapshots[snapshot]
        for item, start in self.items.encodes():
            assert 0 <= start <= self.layout.item_tokens - item.length
            self.encoded.append(item.content_hash)
            self._rows |= {start + i: (item.content_hash, i) for i in range(item.length)}

    def _check_items(self, state: RequestState, start: int, end: int) -> None:
        """The rows that stand in for tokens of this chunk, or that all see, are those of the item."""
        for item, first in zip(state.request.items, state.item_starts, strict=True):
            positions = range(item.position, item.position + item.length)
            for i in range(item.length):
                if item.position < 0 or start <= positions[i] < end:
                    assert first >= 0
                    assert self._rows.get(first + i) == (item.content_hash, i), "rows of another item"

    def _check_past(self, output: SchedulerOutput, i: int, hashes: list[int], start: int, end: int) -> None:
        """What the entry's first position sees, up to ``end``, is there; what lies behind its window was given back."""
        slot, id = int(output.slots[i]), output.requests[i].request.id
        for g, (window, size) in enumerate(zip(self.windows, self.block_sizes, strict=True)):
            first = max(0, start - window + 1) if window else 0
            for position in range(first, end):
                at = int(output.tables[g][slot, position // size])
                assert at, f"group {g}: position {position} of {id} has no block"
                assert self._cache.get((at, position % size)) == (g, hashes[position]), (
                    f"group {g}: position {position} of {id} leads to something else"
                )
            if output.pending is None or not output.pending[i]:
                assert not output.tables[g][slot, : first // size].any(), "holds blocks behind the window"

    def _score(self, entry: Entry, state: RequestState, query_len: int) -> None:
        """Rows are the sampled ones, and prompt positions to be scored."""
        end, prompt = entry.start + entry.count, state.request.prompt
        sampled = query_len if entry.samples else 0
        positions = list(range(end - entry.rows, end - sampled))
        if state.request.params.prompt_logprobs is None:
            assert not positions
            return
        assert all(entry.start <= p < len(prompt) - 1 for p in positions)
        self.scored.setdefault(entry.id, []).extend(positions)

    def _drafts(self, output: SchedulerOutput, i: int) -> list[int]:
        """What an entry verifies: the host's drafts, or those on the device."""
        if i < output.verified and output.drafts is not None:
            return [int(d) for d in output.drafts[i]]
        wire, count = output.requests[i].request, _query_len(output, i) - 1
        drafts = continuation(wire, self._known[wire.id], count)
        right = (self.right + i) % (count + 1)
        return [t if j < right else (t + 1) % VOCAB for j, t in enumerate(drafts)]

    def _sample(self, output: SchedulerOutput, starts: list[int]) -> _Flight:
        tokens = np.full(int(output.rows.sum()), VOCAB + 1, dtype=np.int32)  # scores have no token
        num_kept = np.ones(len(starts), dtype=np.int32)
        ends = np.cumsum(output.rows)
        for i, state in enumerate(output.requests):
            q = _query_len(output, i)
            wire, id = state.request, state.request.id
            self._computed[id] = starts[i] + int(output.counts[i])
            self._unsure[id] = self._unsure.get(id, 0)
            if not output.samples[i]:
                continue
            known, drafts = self._known[id], self._drafts(output, i)
            # Draws behind a wrong draft are of another past; any token stands for them.
            drawn = continuation(wire, known, q)
            error = self.requests[id].error_at - (len(known) - len(wire.prompt))
            if 0 <= error < q:
                drawn[error] = ERROR
            kept = next((j for j, d in enumerate(drafts) if d != drawn[j]), len(drafts)) + 1
            num_kept[i] = kept
            tokens[ends[i] - q : ends[i]] = drawn
            known += drawn[:kept]
            self._computed[id] -= q - kept
            self._unsure[id] += q - kept
            if q > 1:
                self.verified.append((q, kept))
        return _Flight(output, [s.request.id for s in output.requests], tokens, num_kept if output.verified else None)

    def _take(self, commit: Commit, flight: _Flight) -> None:
        """Compare news with what each request gets alone."""
        assert len({id(s) for s in commit.requests}) == len(commit.requests)
        ends = np.cumsum(flight.output.rows)
        told = {s.request.id for s in commit.requests}
        for i, name in enumerate(flight.ids):
            if flight.num_kept is not None and name in told:
                self._unsure[name] -= _query_len(flight.output, i) - int(flight.num_kept[i])
        for place, (state, new) in enumerate(zip(commit.requests, commit.tokens, strict=True)):
            name = state.request.id
            assert name in flight.ids
            assert name not in self.reason, "news of a request that ended"
            began = not self.output[name]
            self.output[name] += new
            assert state.output == self.output[name]
            known = self.requests[name]
            assert self.output[name] == known.expected[: len(self.output[name])]
            i = flight.ids.index(name)
            kept = 1 if flight.num_kept is None else int(flight.num_kept[i])
            q = _query_len(flight.output, i)
            given = flight.tokens[ends[i] - q : ends[i] - q + kept].tolist()
            done = len(self.output[name]) == len(known.expected) and (known.reason != "error" or ERROR in given)
            assert state.finish_reason == (known.reason if done else None)
            assert (place in commit.events) == (done or began)
            if done:
                self.reason[name] = known.reason
                if self.tiers is not None:
                    self.tiers.end(name, self.output[name])
                stopped = known.reason == "stop" and known.wire.limit
                assert state.stop_reason == (known.expected[-1] if stopped else None)
                self._check_scored(known.wire)

    def _check_scored(self, wire: EngineRequest) -> None:
        """Each prompt position but the last was scored once; a fork's are those of its leader."""
        scored, every = self.scored.get(wire.id, []), list(range(len(wire.prompt) - 1))
        if wire.params.prompt_logprobs is not None:
            assert scored == every or (wire.fork_of and not scored)

    def check(self, planned: SchedulerOutput | None = None) -> None:
        """References are those of the block tables, and every other block is free; so for snapshots and items.
        planned: the step that was started last."""
        scheduler, pool = self.scheduler, self.pool
        counted: Counter[int] = Counter()
        for table in scheduler.cache.tables:
            counted.update(table[table > 0].tolist())
        counted.update(self.tiers.promotions.held_blocks if self.tiers is not None else ())
        assert {p: r for p, r in enumerate(pool.references) if r} == dict(counted)
        assert pool.free_blocks + len(counted) == len(pool.references) - 1
        assert scheduler.unfinished == len(self.requests) - len(self.reason)
        assert scheduler.running + scheduler.waiting == scheduler.unfinished
        used = {s.slot for s in self.alive.values() if s.slot >= 0}
        assert len(used) == scheduler.running
        for slot in set(range(self.limits.max_num_seqs)) - used:
            assert not any(table[slot].any() for table in scheduler.cache.tables)
        held = {i.content_hash: i.length for s in self.alive.values() if s.slot >= 0
                for i, first in zip(s.request.items, s.item_starts, strict=True) if first >= 0}  # fmt: skip
        assert self.items.cache.held_rows == sum(held.values())
        if not self.unfinished and planned is None:
            for snapshots in scheduler.cache.states.pools:
                assert snapshots.pool.free_blocks == len(snapshots.pool.references) - 1


def _entries(output: SchedulerOutput) -> list[Entry]:
    columns = (output.starts, output.counts, output.rows, output.samples, output.fed)
    ids = [s.request.id for s in output.requests]
    return [Entry(*row) for row in zip(ids, *(c.tolist() for c in columns), strict=True)]


def _query_len(output: SchedulerOutput, i: int) -> int:
    return output.query_len if i < output.verified else 1


def _hashes(wire: EngineRequest, tokens: List[int]) -> list[int]:
    """Of every position and all before it."""
    found, past = [], beginning(wire)
    for token in seen(wire, tokens):
        past = extend(past, token)
        found.append(past)
    return found


def item(content: str, position: int, length: int) -> Item:
    """An encoded input."""
    return Item(content_hash=content, position=position, length=length)
