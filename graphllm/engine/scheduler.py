"""Scheduler: which sequences get how many tokens in the next step, and which pages they use. No torch in here.

First come, first served. A sequence is admitted when the pages for its whole life are free, so it is never preempted;
decoding sequences go first, prompts fill the rest of the token budget in chunks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from graphllm.config import ConfigError
from graphllm.engine.params import SamplingParams


@dataclass
class Sequence:
    """One request inside the engine. seed: of its random draws. stop_ids: tokens that end it.

    computed: tokens whose keys and values are in the cache. pages: its pages, in order.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: str | None = None

    @property
    def known(self) -> int:
        """Tokens whose ids are known: the prompt and what was sampled."""
        return len(self.prompt) + len(self.output)


class Scheduled(NamedTuple):
    """One sequence's part of a step: ``tokens`` tokens from its position ``start``; sampled when they reach its end."""

    sequence: Sequence
    start: int
    tokens: int
    samples: bool


class Scheduler:
    """Queues and pages. limits: sequences and tokens in one step; pages of ``page_size`` tokens in the cache."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, pages: int, page_size: int) -> None:
        self._max_num_seqs, self._max_num_tokens, self._page_size = max_num_seqs, max_num_tokens, page_size
        self._total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def unfinished(self) -> int:
        """Sequences waiting or running."""
        return len(self._waiting) + len(self._running)

    @property
    def free_pages(self) -> int:
        """Pages that belong to no sequence."""
        return len(self._free)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ConfigError when it could never run: its tokens do not fit in the whole cache."""
        if self._pages_for(sequence) > self._total:
            raise ConfigError(
                f"request {sequence.id}: {len(sequence.prompt)} prompt tokens and up to {sequence.limit} more need "
                f"{self._pages_for(sequence)} cache pages of {self._page_size} tokens, there are {self._total}; "
                "shorten it, lower max_tokens, or give the cache more memory"
            )
        self._waiting.append(sequence)

    def _pages_for(self, sequence: Sequence) -> int:
        return -(-(len(sequence.prompt) + sequence.limit) // self._page_size)

    def next(self) -> list[Scheduled]:
        """The next step's work; empty only when there is none."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            need = self._pages_for(self._waiting[0])
            if need > len(self._free):
                break
            sequence = self._waiting.popleft()
            sequence.pages = [self._free.pop() for _ in range(need)]
            self._running.append(sequence)
        budget, plan = self._max_num_tokens, []
        # Sequences with one token left to compute are decoding: they go before prompts, so streams never stall.
        for sequence in sorted(self._running, key=lambda s: s.known - s.computed > 1):
            count = min(sequence.known - sequence.computed, budget)
            if count:
                plan.append(Scheduled(sequence, sequence.computed, count, sequence.computed + count == sequence.known))
                budget -= count
        return plan

    def commit(self, plan: list[Scheduled], tokens: list[int]) -> list[Sequence]:
        """Record a step's result, one token for each entry of the plan; returns the sequences that have a new token."""
        advanced = []
        for entry, token in zip(plan, tokens, strict=True):
            sequence = entry.sequence
            sequence.computed += entry.tokens
            if entry.samples:
                sequence.output.append(token)
                advanced.append(sequence)
                if token in sequence.stop_ids:
                    sequence.finish_reason = "stop"
                elif len(sequence.output) >= sequence.limit:
                    sequence.finish_reason = "length"
        for sequence in [s for s in self._running if s.finish_reason]:
            self.release(sequence)
        return advanced

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's pages back and forget it."""
        self._running = [s for s in self._running if s is not sequence]
        self._waiting = deque(s for s in self._waiting if s is not sequence)
        self._free += reversed(sequence.pages)
        sequence.pages = []
