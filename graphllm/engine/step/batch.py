"""From the scheduler's output to arrays: sampling parameters of running requests, by slot, and one step's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from graphllm.config.requests.sampling_params import sampling_columns
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.row_layout import row_layout
from graphllm.engine.step.token_ids import token_ids
from graphllm.program.schema import CacheLayout
from graphllm.runtime.memory.staging import StepInput

_INT32 = 2**31 - 1
IN_PROMPT = 1 << 30  # flag of `process_logits` in the counts
_NO_SLOTS = np.array([-1], dtype=np.int32)  # equal to the slots of no step


class Rows(NamedTuple):
    """The sampled rows of a step, in order. R rows, n entries in the scheduler's output.

    entry, slot [R]: of each row.
    sample_index [R]: index of the output token that the row samples; negative for a row inside the prompt, which only
        scores the next prompt token. It is too high by the drafts that the step in flight rejects.
    place [R]: drafts of its entry before the row.
    wanted [R]: top log-probabilities wanted; -1 for none at all.
    masked: rows that have a mask, in the order of the mask's rows.
    """

    entry: np.ndarray
    slot: np.ndarray
    sample_index: np.ndarray
    place: np.ndarray
    wanted: np.ndarray
    masked: np.ndarray


class Batch(NamedTuple):
    """A step's input. full: whether it needs more than plain sampling."""

    step: StepInput
    rows: Rows
    full: bool


class SamplingTable:
    """Sampling parameters of the running requests as arrays by slot; the last slot is scrap. ranked: log-probabilities
    that a step finds at each position."""

    def __init__(self, slots: int, vocab: int, ranked: int) -> None:
        self._scrap, self._vocab, self._ranked = slots, vocab, ranked
        self.words = -(-vocab // 32)

        def column(dtype: type, neutral: float = 0) -> np.ndarray:
            return np.full(slots + 1, neutral, dtype=dtype)

        self._columns = {c: column(np.dtype(c.dtype).type, c.neutral) for c in sampling_columns()}
        self.counted, self.bias_count = column(np.int32), column(np.int32)
        self.wanted, self.wanted_prompt = column(np.int32, -1), column(np.int32, -1)
        self.prompt_len, self.min_tokens = column(np.int32), column(np.int32)
        self.masked, self.special = column(bool), column(bool)
        self._numbers = np.arange(slots + 1, dtype=np.int32)
        self._base: dict[int, np.ndarray] = {}
        self._last_slots = _NO_SLOTS
        self._last_rows: dict[str, np.ndarray] = {}

    def admit(self, state: RequestState) -> bool:
        """Fill a slot; whether it has state on the device, penalties or bias."""
        slot, request, p = state.slot, state.request, state.request.params
        self._last_slots = _NO_SLOTS
        for definition, values in self._columns.items():
            value = getattr(request if definition.source == "request" else p, definition.name)
            values[slot] = min(value, _INT32) if definition.dtype == "int32" else value
        counted = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        self.counted[slot], self.bias_count[slot] = counted, len(p.logit_bias or {})
        # More than those are fetched apart; the row's own one and its rank are wanted then too.
        self.wanted[slot], self.wanted_prompt[slot] = self._wanted(p.logprobs), self._wanted(p.prompt_logprobs)
        self.prompt_len[slot] = len(request.prompt)
        self.min_tokens[slot] = p.min_tokens if request.stop_ids else 0
        self._base.pop(slot, None)
        if p.allowed_token_ids is not None:
            base = self._base[slot] = np.zeros(self.words, dtype=np.int32)
            for token in p.allowed_token_ids:
                _set(base, token, True)
        self.masked[slot] = slot in self._base
        has_state = bool(counted or p.logit_bias)
        wants = p.logprobs is not None or p.prompt_logprobs is not None
        self.special[slot] = has_state or wants or self.masked[slot]
        return has_state

    def always_mask(self, slot: int) -> None:
        """Each row of a slot has a mask of its own."""
        self.masked[slot] = self.special[slot] = True

    def stop_at_logits(self, slot: int) -> None:
        """Each step of a slot stops at its logits, once all tokens before it are known."""
        self.special[slot] = True

    def _wanted(self, logprobs: int | None) -> int:
        return -1 if logprobs is None else logprobs if 0 <= logprobs <= self._ranked else 0

    def states(self, prompt: Sequence[int], output: Sequence[int], bias: Mapping[int, float]) -> dict[str, np.ndarray]:
        """What a slot's states begin with: penalty counts for both lists, and the logit bias."""
        counts = np.zeros(self._vocab, dtype=np.int32)
        np.add.at(counts, np.asarray(output, dtype=np.int64), 1)
        counts[np.asarray(prompt, dtype=np.int64)] |= IN_PROMPT
        tokens, values = np.array(list(bias), dtype=np.int32), np.array(list(bias.values()), dtype=np.float32)
        return {"counts": counts, "bias_token": tokens, "bias_value": values}

    def mask_row(self, row: np.ndarray, slot: int, state: RequestState, output: Sequence[int]) -> None:
        """Write the mask [words] of everything but a grammar and bad words: allowed ids, the end of thinking, and no
        stop before min_tokens or before what is structured.

        row holds what is allowed so far and is narrowed. output: what stands before it, drafts included.
        """
        base = self._base.get(slot)
        if base is not None:
            row &= base
        request = state.request
        if request.thinking is not None and (forced := request.thinking.forced(output)) is not None:
            row[:] = 0
            _set(row, forced, True)
        unanswered = (  # it must not end within its thinking, with nothing of what was asked for
            request.thinking is not None
            and request.params.structured_outputs is not None
            and request.thinking.goes_on(output)
        )
        if unanswered or len(output) < request.params.min_tokens:
            narrowed = row.copy()
            for token in request.stop_ids:
                _set(narrowed, token, False)
            if narrowed.any():  # a grammar that is complete allows nothing but its end
                row[:] = narrowed

    def masking(self, slots: np.ndarray) -> bool:
        """Whether any of these slots may need a mask, for which the host must know its drafts."""
        return bool(np.count_nonzero(self.masked[slots] | (self.min_tokens[slots] > 0)))

    def stage(self, output: SchedulerOutput, requests: RequestTable, layout: CacheLayout, hooked: bool) -> Batch:
        """The step's arrays. hooked: a user's function edits the logits, so sampling is never plain."""
        rows = row_layout(output, requests, layout, self._numbers, self.prompt_len)
        slots, slot_R, sample_index = output.slots, rows.slot, rows.sample_index
        n, T, R = len(slots), len(rows.positions), len(rows.entry)
        surely = sample_index
        if output.pending is not None:
            surely = sample_index - (layout.ahead(layout.query_lens[-1]) - 1) * output.pending[rows.entry]
        special = self.special[slot_R] | (surely < self.min_tokens[slot_R])
        full = hooked or np.count_nonzero(special) > 0
        total = output.starts + output.counts
        longest = int(total.max()) + layout.lookahead
        arrays = {
            "token_ids": token_ids(output, requests, rows.query_start_loc[1:], T),
            "positions": rows.positions,
            "context_lens": rows.known,
            "logits_indices": rows.logits_indices,
            "query_start_loc": rows.query_start_loc,
            "seq_lens": total,
            "slots": slots,
            **{
                f"block_table.{g}": table[slots, : -(-longest // group.block_size)]
                for g, (table, group) in enumerate(zip(output.tables, layout.groups, strict=True))
            },
            "row_slots": np.where(rows.last & (sample_index >= 0), slot_R, self._scrap),
            "sample_index": sample_index,
            **self._sampling(slot_R),
            **rows.of_drafts,
        }
        step = StepInput(T, n, R, rows.query_len, arrays, output.num_drafts, num_independent=output.num_independent)
        if not full:
            none = sample_index[:0]
            return Batch(step, Rows(rows.entry, slot_R, sample_index, none, sample_index, none), False)
        place = np.zeros(R, dtype=np.int32) if rows.place is None else rows.place
        return self._full(output, step, Rows(rows.entry, slot_R, sample_index, place, surely, surely))

    def _sampling(self, slot_R: np.ndarray) -> dict[str, np.ndarray]:
        """The sampling parameters; most steps have the rows of the one before."""
        if not np.array_equal(slot_R, self._last_slots):
            self._last_slots = slot_R
            self._last_rows = {c.name: values[slot_R] for c, values in self._columns.items()}
        return self._last_rows

    def _full(self, output: SchedulerOutput, step: StepInput, rows: Rows) -> Batch:
        """rows: with the lowest that each sample index may be, in place of what is wanted."""
        entry, slot_R, sample_index, place, surely, _ = rows
        sampling = sample_index >= 0
        wanted = np.where(sampling, self.wanted[slot_R], self.wanted_prompt[slot_R])
        masked = np.flatnonzero(sampling & (self.masked[slot_R] | (surely < self.min_tokens[slot_R])))
        mask_row = np.full(len(entry), -1, dtype=np.int32)
        mask_row[masked] = np.arange(len(masked))
        target = np.full(len(entry), -1, dtype=np.int32)
        for row in np.flatnonzero(~sampling):
            prompt = output.requests[entry[row]].request.prompt
            target[row] = prompt[len(prompt) + sample_index[row]]
        edits = {
            "counted": np.where(sampling, self.counted[slot_R], 0),
            "mask_row": mask_row,
            "bias_count": np.where(sampling, self.bias_count[slot_R], 0),
            "target": target,
            "wanted": wanted,
        }
        step = step._replace(arrays={**step.arrays, **edits})
        return Batch(step, Rows(entry, slot_R, sample_index, place, wanted, masked), True)


def _set(mask: np.ndarray, token: int, allowed: bool) -> None:
    bits = mask.view(np.uint32)
    if allowed:
        bits[token >> 5] |= np.uint32(1 << (token & 31))
    else:
        bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
