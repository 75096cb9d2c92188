"""The scheduler alone: whatever arrives, pages and budgets are kept, streams never stall, and everything finishes."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphllm.config import ConfigError
from graphllm.engine.params import SamplingParams
from graphllm.engine.scheduler import Scheduled, Scheduler, Sequence

STOP = 99


def _sequence(id: str, prompt: int, limit: int) -> Sequence:
    return Sequence(id, list(range(prompt)), SamplingParams(), 0, frozenset({STOP}), limit)


@dataclass(frozen=True)
class Limits:
    """One scheduler's limits."""

    seqs: int
    tokens: int
    pages: int
    page_size: int


LIMITS = st.integers(1, 5).flatmap(
    lambda seqs: st.builds(Limits, st.just(seqs), st.integers(max(2, seqs), 24), st.integers(1, 30), st.integers(1, 9))
)


def _check(plan: list[Scheduled], scheduler: Scheduler, limits: Limits) -> None:
    """What must hold of every step."""
    assert 1 <= len(plan) <= limits.seqs
    assert sum(p.tokens for p in plan) <= limits.tokens
    assert len({p.sequence.id for p in plan}) == len(plan)
    used = [page for s in scheduler._running for page in s.pages]
    assert len(used) == len(set(used)), "a page belongs to one sequence"
    assert len(used) + scheduler.free_pages == limits.pages
    assert set(used) <= set(range(limits.pages))
    for sequence, start, count, samples in plan:
        assert count >= 1
        assert start == sequence.computed
        assert samples == (start + count == sequence.known)
        assert len(sequence.pages) * limits.page_size >= start + count
    decoding = {s.id for s in scheduler._running if s.known - s.computed == 1}
    assert decoding <= {p.sequence.id for p in plan}, "a stream stalls"


@settings(deadline=None, max_examples=150)
@given(limits=LIMITS, seed=st.integers(0, 10**6))
def test_random_traffic(limits: Limits, seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(limits.seqs, limits.tokens, limits.pages, limits.page_size)
    accepted: dict[str, Sequence] = {}
    admitted: list[str] = []
    for step in range(400):
        if step < 40 and rng.random() < 0.6:
            sequence = _sequence(f"r{step}", rng.randint(1, 40), rng.randint(1, 12))
            fits = len(sequence.prompt) + sequence.limit <= limits.pages * limits.page_size
            if fits:
                scheduler.add(sequence)
                accepted[sequence.id] = sequence
            else:
                with pytest.raises(
                    ConfigError, match=f"request {sequence.id}: .* there are {limits.pages}; shorten it"
                ):
                    scheduler.add(sequence)
        plan = scheduler.next()
        if not plan:
            assert scheduler.unfinished == 0
            if step >= 40:
                break
            continue
        _check(plan, scheduler, limits)
        admitted += [s.id for s in scheduler._running if s.id not in admitted]
        tokens = [STOP if rng.random() < 0.1 else rng.randint(0, 9) for _ in plan]
        advanced = scheduler.commit(plan, tokens)
        assert [s.id for s in advanced] == [p.sequence.id for p in plan if p.samples]
        for p, token in zip(plan, tokens, strict=True):
            if p.samples:
                assert p.sequence.output[-1] == token
                expected = "stop" if token == STOP else "length" if len(p.sequence.output) == p.sequence.limit else None
                assert p.sequence.finish_reason == expected
                assert (p.sequence.pages == []) == (expected is not None)
        if rng.random() < 0.05:  # as a stop string ends one
            unfinished = [s for s in accepted.values() if s.finish_reason is None]
            if unfinished:
                gone = rng.choice(unfinished)
                scheduler.release(gone)
                gone.finish_reason = "stop"
    assert scheduler.unfinished == 0
    assert scheduler.free_pages == limits.pages
    assert all(s.finish_reason for s in accepted.values())
    assert admitted == sorted(admitted, key=lambda id: int(id[1:])), "first come, first served"


def test_prompt_is_prefilled_in_chunks_beside_streams() -> None:
    scheduler = Scheduler(max_num_seqs=2, max_num_tokens=8, pages=20, page_size=4)
    scheduler.add(_sequence("short", 3, 10))
    scheduler.commit(scheduler.next(), [1])
    scheduler.add(_sequence("long", 18, 2))
    steps = []
    for _ in range(4):
        plan = scheduler.next()
        steps.append([(p.sequence.id, p.start, p.tokens, p.samples) for p in plan])
        scheduler.commit(plan, [1] * len(plan))
    assert steps == [
        [("short", 3, 1, True), ("long", 0, 7, False)],
        [("short", 4, 1, True), ("long", 7, 7, False)],
        [("short", 5, 1, True), ("long", 14, 4, True)],
        [("short", 6, 1, True), ("long", 18, 1, True)],
    ]


def test_needs_no_torch() -> None:
    script = "import sys, graphllm.engine.scheduler; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
