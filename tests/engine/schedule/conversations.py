"""Conversations that take turns, over a scheduler and a device of hashes: what their prompts find in the cache.

A recurrent state is a hash of all tokens that it has taken in, and a block holds the hash of all tokens up to its
newest one. The next token is a function of the state and of all blocks that the sequence sees, so a wrong state or
block gives another text than `Text.answer`, which knows of neither.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graphllm.config import TierConfig
from graphllm.engine.parts.tiers import Tiers
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.schedule.scheduler_output import SchedulerLimits, SchedulerOutput
from graphllm.program.schema import BORDER, CacheGroup, CacheLayout
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.tiers import (
    AwaitStores,
    LoadEntries,
    OpenTiers,
    PrepareEntries,
    ReadyEntries,
    StoreEntries,
)
from tests.engine.simulation import request
from tests.engine.tiers.simulated import simulated_tiers

BLOCK, VOCAB, LONGEST = 64, 1000, 1 << 17
_FACTOR = 0x9E3779B97F4A7C15  # odd
_POWERS = np.cumprod(np.full(LONGEST, _FACTOR, dtype=np.uint64))
_INVERSES = np.cumprod(np.full(LONGEST, pow(_FACTOR, -1, 1 << 64), dtype=np.uint64))


def hashes(before: int, tokens: Sequence[int]) -> np.ndarray:
    """Of each token and all before it: h <- h * factor + token + 1, modulo 2**64. before: of what precedes them."""
    n = len(tokens)
    terms = (np.array(tokens, dtype=np.uint64) + np.uint64(1)) * _INVERSES[:n]
    return (np.cumsum(terms, dtype=np.uint64) + np.uint64(before)) * _POWERS[:n]


def sampled(state: int, blocks: int) -> int:
    """The next token. blocks: sum over the sequence's blocks."""
    mixed = (state ^ (blocks * _FACTOR)) & (2**64 - 1)
    return (mixed * _FACTOR >> 32 & 0xFFFFFFFF) * VOCAB >> 32


def stops(most: int) -> range:
    """Tokens that end an answer, of which most are shorter than that."""
    return range(VOCAB * 3 // (2 * most))


class Text:
    """A conversation so far. What follows it is computed from the tokens themselves."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._state = self._full = 0  # hash of all, and the sum of it over full blocks

    def extend(self, tokens: Sequence[int]) -> None:
        past = hashes(self._state, tokens)
        first = -(len(self.tokens) + 1) % BLOCK
        self._state, self._full = int(past[-1]), (self._full + int(past[first::BLOCK].sum(dtype=np.uint64))) % 2**64
        self.tokens += tokens

    def answer(self, most: int) -> list[int]:
        """What a request with this prompt gets."""
        state, full, length, found = self._state, self._full, len(self.tokens), list[int]()
        while True:
            found.append(sampled(state, full if length % BLOCK == 0 else full + state))
            if found[-1] in stops(most) or len(found) == most:
                return found
            state = (state * _FACTOR + found[-1] + 1) % 2**64
            length += 1
            full = (full + state) % 2**64 if length % BLOCK == 0 else full


class _HostMemory:
    """Copies between a device's arrays and the host's, which are there at once. arrays: the device's, by kind."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._device, self._host = arrays, dict[str, np.ndarray]()
        self._ended: list[tuple[int, float]] = []

    def do(self, command: Command) -> None:
        match command:
            case OpenTiers(entries):
                self._host = {kind: np.zeros(count, dtype=np.uint64) for kind, count in entries.items()}
            case StoreEntries(pairs):
                for kind, of in pairs.items():
                    for place, entry in of:
                        self._host[kind][entry] = self._device[kind][place]
            case LoadEntries(pairs, ticket):
                for kind, of in pairs.items():
                    for entry, place in of:
                        self._device[kind][place] = int(self._host[kind][entry])
                self._ended.append((ticket, 1e-3))
            case AwaitStores() | PrepareEntries():
                pass
            case _:
                raise AssertionError(command)

    def ask(self, query: Query) -> list[Answered]:
        if isinstance(query, ReadyEntries):
            return [Answered({kind: len(of) for kind, of in self._host.items()})]
        found, self._ended = self._ended, []
        return [Answered(found)]


class Device:
    """A scheduler, and a device that runs one step ahead of it.

    snapshots: of recurrent states; 0: there are none.
    exports: states that a step leaves inside of chunks.
    host: how many times the device's cache fits into host memory; 0: there are no tiers.
    """

    def __init__(
        self, blocks: int, snapshots: int, slots: int = 8, step_tokens: int = 8192, exports: int = 0, host: int = 0
    ) -> None:
        limits = SchedulerLimits(slots, step_tokens, step_tokens, LONGEST, BLOCK)
        self.recurrent = snapshots > 0
        entries = tuple(range(slots + 1, slots + 1 + exports))
        layout = CacheLayout(
            (CacheGroup("full", 0, BLOCK),), blocks, recurrent=self.recurrent, num_snapshots=snapshots, exports=entries
        )
        self._exported: dict[int, int] = {}  # by entry
        self.scheduler = Scheduler(limits, layout, secret="s")
        self._blocks = np.zeros(blocks, dtype=np.uint64)
        self._states, self._snapshots, self._last = [0] * slots, [0] * snapshots, [0] * slots
        self._flight: tuple[SchedulerOutput, np.ndarray] | None = None
        self.saves = 0
        self.tiers: Tiers | None = None
        if host:
            memory: Any = _HostMemory({"blocks": self._blocks, "snapshots": self._snapshots})
            config = TierConfig(host * (blocks + snapshots + 1), "lru")
            self.tiers = simulated_tiers(memory, self.scheduler, limits, layout, config)
            self.scheduler.admission.resources = [self.tiers.resource]

    @property
    def busy(self) -> bool:
        """Whether a step is in flight, or a copy."""
        return self._flight is not None or (self.tiers is not None and self.tiers.busy)

    def step(self) -> list[Any]:
        """Plan and start a step, and take the result of the one before; states of the requests that ended."""
        if self.tiers is not None:
            assert not list(self.tiers.gather(idle=False))
        plan = self.scheduler.next()
        if self.tiers is not None:
            self.tiers.planned(plan)
        started = None if plan is None else (plan, self._run(plan))
        if self.tiers is not None and plan is not None:
            list(self.tiers.started(None))  # type: ignore[arg-type]
        ended = []
        if self._flight is not None:
            ended = [s for s in self.scheduler.commit(*self._flight).requests if s.finish_reason is not None]
        self._flight = started
        for state in ended if self.tiers is not None else ():
            self.tiers.end(state.request.id, state.output)
        return ended

    def abort(self, id: str) -> None:
        """End a request."""
        self.scheduler.abort([id])
        if self.tiers is not None:
            self.tiers.end(id, ())

    def _run(self, plan: SchedulerOutput) -> np.ndarray:
        for slot in plan.resets:
            self._states[slot] = 0
        for snapshot, slot in plan.snapshot_loads:
            self._states[slot] = self._snapshots[snapshot]
        tokens, (table,) = [], plan.tables
        for i, state in enumerate(plan.requests):
            slot, start, count = int(plan.slots[i]), int(plan.starts[i]), int(plan.counts[i])
            given = [self._last[slot]] if plan.fed[i] else state.tokens(start, start + count)
            before = self._states[slot]
            if not self.recurrent:  # from the last block before
                before = int(self._blocks[table[slot, (start - 1) // BLOCK]]) if start else 0
            past, end = hashes(before, given), start + count
            written = np.minimum(np.arange(start // BLOCK + 1, -(-end // BLOCK) + 1) * BLOCK, end)
            self._blocks[table[slot, start // BLOCK : -(-end // BLOCK)]] = past[written - 1 - start]
            self._states[slot] = int(past[-1])
            if plan.exports is not None and plan.exports[i] >= 0:
                border = (count - 1) // BORDER * BORDER
                assert count > border > 0
                self._exported[int(plan.exports[i])] = int(past[border - 1])
            if plan.rows[i]:
                seen = self._blocks[table[slot, : -(-end // BLOCK)]].sum(dtype=np.uint64)
                self._last[slot] = sampled(self._states[slot], int(seen))
                tokens.append(self._last[slot])
        for slot, snapshot in plan.snapshot_saves:
            self._snapshots[snapshot] = self._exported[slot] if slot in self._exported else self._states[slot]
        self._exported.clear()
        self.saves += len(plan.snapshot_saves)
        return np.array(tokens, dtype=np.int32)


class Trace(NamedTuple):
    """Conversations that come one after the other.

    count: of them.
    turns: of each.
    at_once: of them that go on at a time, each in its turn.
    common: tokens with which all begin.
    tokens: of a whole one, about.
    answer: tokens of one at most.
    running: requests that the engine has at a time.
    kills: share of the requests that are aborted at some step, and come again.
    """

    count: int
    turns: int
    at_once: int
    common: int
    tokens: int
    answer: int = 120
    running: int = 4
    kills: float = 0.0


class Outcome(NamedTuple):
    """found: tokens that prompts found in the cache.
    lost: those whose blocks were there without a state.
    wrong: answers that are not what the request gets alone.
    killed: requests.
    shortest: tokens of the shortest conversation.
    steps: of the device.
    """

    found: int
    lost: int
    wrong: int
    killed: int
    shortest: int
    steps: int


def run(trace: Trace, device: Device) -> Outcome:
    """All conversations from their beginning to their end."""
    rng, scheduler = random.Random(1), device.scheduler
    common = rng.choices(range(VOCAB), k=trace.common)

    def said(c: int, turn: int, count: int) -> list[int]:
        return random.Random(c * trace.turns + turn).choices(range(VOCAB), k=count)

    each = (trace.tokens - trace.common) // trace.turns
    texts: dict[int, Text] = {}
    idle, running = deque[tuple[int, int]](), dict[str, tuple[int, int]]()  # conversations and their turns
    kill_at: dict[str, int] = {}
    steps = wrong = killed = 0
    while len(texts) < trace.count or idle or running:
        while len(running) < trace.running:
            if len(texts) < trace.count and len(idle) + len(running) < trace.at_once:
                c, turn = len(texts), 0
                texts[c] = Text()
                texts[c].extend(common + said(c, 0, each))
            elif idle:
                c, turn = idle.popleft()
            else:
                break
            id = f"{c} {turn} {steps}"
            running[id] = c, turn
            scheduler.add(request(id, texts[c].tokens, trace.answer, stop_ids=list(stops(trace.answer))))
            if rng.random() < trace.kills:
                kill_at[id] = steps + rng.randrange(40)
        for state in device.step():
            c, turn = running.pop(state.request.id)
            kill_at.pop(state.request.id, None)
            wrong += state.output != texts[c].answer(trace.answer)
            texts[c].extend(state.output)
            if turn + 1 < trace.turns:
                texts[c].extend(said(c, turn + 1, each - len(state.output)))
                idle.append((c, turn + 1))
        for id in [id for id, at in kill_at.items() if at <= steps]:
            idle.appendleft(running.pop(id))
            del kill_at[id]
            device.abort(id)
            killed += 1
        steps += 1
    while scheduler.unfinished or device.busy:
        device.step()
    found, lost = scheduler.admission.prefix_hits, scheduler.admission.prefix_hits_without_state
    return Outcome(found, lost, wrong, killed, min(len(t.tokens) for t in texts.values()), steps)
