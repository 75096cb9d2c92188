"""Chains: which sequence a stored block belongs to; its tokens lie there.

A pool tells the digest of a block that it has stored, and no more. The digest stands in the chain of the sequence that
computed the block: one of the step whose result was just taken. Each chain is searched from where the last search has
ended, so all searches together look at a digest about once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.scheduler import Scheduler
from graphllm.engine.schedule.scheduler_output import SchedulerOutput


class Place(NamedTuple):
    """Of a digest: its number in the chain of a sequence."""

    state: RequestState
    number: int


class Chains:
    """scheduler: its sequences are searched. block_size: tokens from one digest of a chain to the next."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self.block_size = scheduler, scheduler.cache.block_size
        self._searched = np.zeros(len(scheduler.requests.by_slot), dtype=np.int32)  # by slot: tokens of its chain

    def begin(self, plan: SchedulerOutput) -> None:
        """A step was planned: what its new sequences have found in the cache they will not store."""
        for state in plan.admitted:
            self._searched[state.slot] = self._scheduler.cache.stored[state.slot]

    def find(self, wanted: set[bytes], plan: SchedulerOutput | None) -> dict[bytes, Place]:
        """The places of digests, as far as there are any. plan: of the step whose result was just taken, if any."""
        search = _Search(wanted)
        if plan is not None:
            self._of_step(search, plan)
        if search.missing:  # stored as its sequence was preempted, or brought back for one that waits
            for state in self._scheduler.states:
                if state.slot < 0:
                    search.look(state, 0, len(state.digests))
        if search.missing:
            for state in self._scheduler.states:
                search.look(state, 0, len(state.digests))
        return search.found

    def _of_step(self, search: _Search, plan: SchedulerOutput) -> None:
        size, slots, requests = self.block_size, plan.slots, plan.requests
        begin, end = self._searched[slots], self._scheduler.cache.stored[slots]
        for i in np.flatnonzero(end > begin).tolist():
            state, slot = requests[i], int(slots[i])
            if state.slot == slot:
                search.look(state, int(begin[i]) // size, int(end[i]) // size)
                self._searched[slot] = end[i]
        if search.missing:
            for state, first in zip(requests, begin.tolist(), strict=True):
                if state.slot < 0:  # it has ended
                    search.look(state, first // size, len(state.digests))
        if search.missing:  # snapshots, which lie in the step's own tokens
            for state, start, count in zip(requests, plan.starts.tolist(), plan.counts.tolist(), strict=True):
                search.look(state, start // size, (start + count) // size)


class _Search:
    """wanted: digests. found: their places so far. missing: the others."""

    def __init__(self, wanted: set[bytes]) -> None:
        self.missing, self.found = set(wanted), dict[bytes, Place]()

    def look(self, state: RequestState, begin: int, end: int) -> None:
        """Look at the digests of a sequence from number ``begin`` on, up to ``end``."""
        digests, missing = state.digests, self.missing
        for number in range(begin, min(end, len(digests)) if missing else begin):
            if (digest := digests[number]) in missing:
                missing.discard(digest)
                self.found[digest] = Place(state, number)
