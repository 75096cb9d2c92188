"""Chunks: how many tokens of a prompt a step computes, and how many of their rows it needs. No torch."""

from __future__ import annotations

from graphllm.engine.cache.slot_states import SlotStates
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.scheduler_output import SchedulerLimits
from graphllm.program.schema import CacheLayout


class Chunks:
    """states: where chunks must end for snapshots of recurrent states."""

    def __init__(self, limits: SchedulerLimits, layout: CacheLayout, table: RequestTable, states: SlotStates) -> None:
        self._limits, self._layout, self._table, self._states = limits, layout, table, states

    def rows(self, state: RequestState, slot: int, count: int) -> int:
        """Logit rows of a chunk: the last one if it is sampled from, and prompt positions yet to be scored."""
        t = self._table
        start = int(t.num_computed_tokens[slot])
        end = start + count
        rows = int(end == t.num_tokens[slot] + t.num_in_flight[slot])
        if t.scoring[slot]:
            rows += max(0, min(end, int(t.num_prompt_tokens[slot]) - 1) - max(start, state.scored))
        return rows

    def fitting(self, state: RequestState, slot: int, budget: int, rows: int) -> int:
        """Tokens of a prompt that fit into the rest of a step. budget, rows: tokens and logit rows that are left."""
        start, known = int(self._table.num_computed_tokens[slot]), int(self._table.num_tokens[slot])
        if self._layout.stateless:  # nothing would be left of a part
            count = known - start
            return count if count <= budget and self.rows(state, slot, count) <= rows else 0
        count = min(self._states.chunk_end(slot, start, known) - start, budget)
        if self._limits.long_prefill_token_threshold:
            count = min(count, self._limits.long_prefill_token_threshold)
        while count and self.rows(state, slot, count) > rows:
            count -= min(count, max(1, self.rows(state, slot, count) - rows))
        return count
