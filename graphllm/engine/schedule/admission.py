"""Admission: waiting requests, and which of them get a slot in the next step. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.cache.cache_manager import CacheManager
from graphllm.engine.cache.retention import NEVER
from graphllm.engine.requests.request import EngineRequest, QueueFullError
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.chunks import Chunks
from graphllm.engine.schedule.resource import Resource
from graphllm.engine.schedule.scheduler_output import SchedulerLimits
from graphllm.program.schema import CacheLayout

Entries = list[tuple[np.ndarray, np.ndarray]]  # slots, counts of their tokens
_MOST_HELD_BACK = 256  # requests that others may pass in one look, so that a step costs the same however many wait


class Admission:
    """A heap of waiting requests.

    by_id: all requests, with and without a slot.
    resources: what requests need in addition to a slot and blocks.
    prefix_queries, prefix_hits: prompt tokens that were looked up in the cache, and found there.
    prefix_hits_without_state: see `Hit`.
    """

    def __init__(
        self, limits: SchedulerLimits, layout: CacheLayout, table: RequestTable, cache: CacheManager, chunks: Chunks,
        by_id: Mapping[str, RequestState],
    ) -> None:  # fmt: skip
        self._limits, self._layout, self._table = limits, layout, table
        self._cache, self._chunks, self._by_id = cache, chunks, by_id
        self._waiting: list[RequestState] = []
        self.resources: Sequence[Resource] = ()
        self.prefix_queries = self.prefix_hits = self.prefix_hits_without_state = 0

    def __len__(self) -> int:
        """Waiting requests, with some that have ended since."""
        return len(self._waiting)

    def check(self, request: EngineRequest, waiting: int) -> None:
        """Raise ConfigError for a request that cannot run, QueueFullError when no more may wait. waiting: requests that
        do."""
        queued = self._limits.max_num_queued_reqs
        # Siblings come or are refused with their first, else one request with many completions would never fit.
        if queued is not None and not request.fork_of and waiting >= queued:
            raise QueueFullError(f"the queue is full: {queued} requests are waiting; send the request again later")
        length = min(len(request.prompt) + request.limit, self._limits.max_len)
        if length > self._cache.capacity:
            raise ConfigError(
                f"request {request.id}: {len(request.prompt)} prompt tokens and up to {request.limit} of output are "
                f"more than the {self._cache.capacity} that the cache holds; shorten it, lower max_tokens, or give the "
                "cache more memory"
            )
        scored = request.params.prompt_logprobs is not None
        longest = min(self._limits.max_num_batched_tokens, self._limits.max_num_rows if scored else NEVER)
        if self._layout.stateless and len(request.prompt) > longest:
            raise ConfigError(
                f"request {request.id}: {len(request.prompt)} prompt tokens; this model computes a prompt in one step, "
                f"which has at most {longest}; shorten it, or compile with a larger --max-num-batched-tokens"
            )
        for resource in self.resources:
            resource.check(request)

    def push(self, state: RequestState) -> None:
        """A request waits, in its place."""
        heapq.heappush(self._waiting, state)

    def admit(self, entries: Entries, budget: int, rows: int, copies: list[tuple[int, int]]) -> list[RequestState]:
        """Give waiting requests slots, as long as something of the step is left: add them to its entries. budget, rows:
        of tokens and of logit rows that are left. copies: of blocks, before the step; some may be added."""
        admitted: list[RequestState] = []
        held_back: list[RequestState] = []
        for resource in self.resources:
            resource.begin()
        while (
            len(held_back) < _MOST_HELD_BACK and self._waiting and self._table.has_free_slot and budget > 0 and rows > 0
        ):
            state = heapq.heappop(self._waiting)
            if state.finish_reason is not None:
                continue
            # One that has begun to score its prompt by itself goes on by itself.
            begun = state.output or (state.scored and state.scoring)
            leader = None if begun else self._by_id.get(state.request.fork_of)
            if leader is not None and not self._ready_to_fork(leader):
                held_back.append(state)
                continue
            if not all(resource.acquire(state) for resource in self.resources):
                self.release(state, joined=False)
                held_back.append(state)
                continue
            count = self._enter(state, leader, budget, rows, copies)
            if not count:
                self.release(state, joined=False)
                heapq.heappush(self._waiting, state)
                break
            slot = state.slot
            admitted.append(state)
            entries.append((np.array([slot], dtype=np.int32), np.array([count], dtype=np.int32)))
            budget -= count
            rows -= self._chunks.rows(state, slot, count)
        for state in held_back:
            heapq.heappush(self._waiting, state)
        return admitted

    def release(self, state: RequestState, joined: bool) -> None:
        """A request gives back what resources have given it. joined: it had a slot."""
        for resource in self.resources:
            resource.release(state, joined)

    def _ready_to_fork(self, leader: RequestState) -> bool:
        """Whether a leader's whole prompt is in the cache, or in a step that comes before; one that waits comes
        first."""
        return leader.slot >= 0 and self._cache.states.may_fork(self._table, leader.slot)

    def _enter(
        self, state: RequestState, leader: RequestState | None, budget: int, rows: int, copies: list[tuple[int, int]]
    ) -> int:
        """Give a request a slot, what it can share, and room for its first chunk. Returns the chunk's tokens; 0, and
        no slot, when the blocks for all of it are not free, a resource has no place for it or no row is left."""
        cache, t, request, length = self._cache, self._table, state.request, state.num_tokens
        if leader is not None and cache.can_fork(leader.slot, length):
            hit = cache.fork(leader.slot, length)
        else:
            hit = cache.lookup(state)
        if not (cache.fits(length, hit) and all(resource.hold(state, hit.num_tokens) for resource in self.resources)):
            return 0
        slot = t.enter(state, hit.num_tokens, self._limits.max_len)
        t.verifiable[slot] = True
        cache.enter(slot, hit, len(request.prompt))
        for resource in self.resources:
            resource.place(state, t)
        count = self._chunks.fitting(state, slot, budget, rows)
        if not count or not cache.extend(slot, hit.num_tokens, hit.num_tokens + count, copies):
            cache.states.release(hit.snapshot)
            cache.free(slot)
            t.leave(state)
            return 0
        cache.states.begin(state, hit.snapshot)
        if state.cached_tokens < 0:  # one that was preempted finds its own blocks again
            state.cached_tokens = hit.num_tokens
            self.prefix_queries += state.num_tokens
            self.prefix_hits += hit.num_tokens
            self.prefix_hits_without_state += hit.without_state
        return count
