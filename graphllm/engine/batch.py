"""From the scheduler's output to arrays: what the sampling program must know of every running request, by slot, and one
step's input."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphllm.engine.request_table import RequestState, RequestTable
from graphllm.engine.scheduler_output import SchedulerOutput
from graphllm.runtime.staging import StepInput

_FULL = -1  # all bits set
_INT32 = 2**31 - 1
_NO_SLOTS = np.array([-1], dtype=np.int32)  # equal to those of no step


class Rows(NamedTuple):
    """The sampled rows of a step, in order. R rows, n entries in the scheduler's output.

    entry [R]: which of them. slot [R]. sample_index [R]: index of the output token the row samples; negative for a row
    inside the prompt, which only scores the next prompt token. wanted [R]: top log-probabilities wanted, -1: none
    at all. masked: rows that have a mask, in the order of the mask's rows.
    """

    entry: np.ndarray
    slot: np.ndarray
    sample_index: np.ndarray
    wanted: np.ndarray
    masked: np.ndarray


class Batch(NamedTuple):
    """A step's input. full: whether it needs more than plain sampling."""

    step: StepInput
    rows: Rows
    full: bool


class SamplingTable:
    """Sampling parameters of the running requests as arrays by slot; the last slot is scrap."""

    def __init__(self, slots: int, vocab: int) -> None:
        self._scrap, self._vocab = slots, vocab
        self.words = -(-vocab // 32)

        def column(dtype: type, neutral: float = 0) -> np.ndarray:
            return np.full(slots + 1, neutral, dtype=dtype)

        self.temperature, self.top_p, self.min_p = column(np.float32), column(np.float32, 1), column(np.float32)
        self.top_k, self.seed = column(np.int32), column(np.int64)
        self.repetition, self.frequency, self.presence = column(np.float32, 1), column(np.float32), column(np.float32)
        self.counted, self.bias_count = column(np.int32), column(np.int32)
        self.wanted, self.wanted_prompt = column(np.int32, -1), column(np.int32, -1)
        self.prompt_len, self.min_tokens = column(np.int32), column(np.int32)
        self.masked, self.special = column(bool), column(bool)
        self._numbers = np.arange(slots + 1, dtype=np.int32)
        self._base: dict[int, np.ndarray] = {}
        self._last_slots = _NO_SLOTS
        self._last_rows: dict[str, np.ndarray] = {}

    def admit(self, state: RequestState, always_masked: bool) -> bool:
        """Fill a slot; whether it has state on the device, penalties or bias. always_masked: each of its rows has a
        mask of its own (a grammar, bad words of several tokens)."""
        slot, request, p = state.slot, state.request, state.request.params
        self._last_slots = _NO_SLOTS
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = p.temperature, p.top_p, p.min_p
        self.top_k[slot], self.seed[slot] = min(p.top_k, _INT32), request.seed
        self.repetition[slot], self.frequency[slot] = p.repetition_penalty, p.frequency_penalty
        self.presence[slot] = p.presence_penalty
        counted = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        self.counted[slot], self.bias_count[slot] = counted, len(p.logit_bias or {})
        # All log-probabilities (-1) are fetched apart; the row's own one and its rank are wanted then too.
        self.wanted[slot] = -1 if p.logprobs is None else max(p.logprobs, 0)
        self.wanted_prompt[slot] = -1 if p.prompt_logprobs is None else max(p.prompt_logprobs, 0)
        self.prompt_len[slot] = len(request.prompt)
        self.min_tokens[slot] = p.min_tokens if request.stop_ids else 0
        self._base.pop(slot, None)
        single = [words[0] for words in request.bad_words if len(words) == 1]
        if p.allowed_token_ids is not None or single:
            base = np.full(self.words, _FULL if p.allowed_token_ids is None else 0, dtype=np.int32)
            for token in p.allowed_token_ids or ():
                _set(base, token, True)
            for token in single:
                _set(base, token, False)
            self._base[slot] = base
        self.masked[slot] = always_masked or slot in self._base
        has_state = bool(counted or p.logit_bias)
        wants = p.logprobs is not None or p.prompt_logprobs is not None
        self.special[slot] = has_state or wants or self.masked[slot]
        return has_state

    def mask_row(self, row: np.ndarray, slot: int, state: RequestState, sample_index: int) -> None:
        """Write the mask [words] of everything but a grammar: allowed ids, bad words, and no stop before min_tokens.

        row holds what is allowed so far and is narrowed.
        """
        base = self._base.get(slot)
        if base is not None:
            row &= base
        request, output = state.request, state.output
        for *before, last in (words for words in request.bad_words if len(words) > 1):
            if output[-len(before) :] == before:
                _set(row, last, False)
        if sample_index < request.params.min_tokens:
            narrowed = row.copy()
            for token in request.stop_ids:
                _set(narrowed, token, False)
            if narrowed.any():  # a grammar that is complete allows nothing but its end
                row[:] = narrowed

    def must_be_seen(self, slot: int) -> bool:
        """Whether the host must have seen each token of a slot before the next one is sampled."""
        return bool(self.special[slot] or self.min_tokens[slot])

    def stage(self, output: SchedulerOutput, requests: RequestTable, block_size: int, hooked: bool) -> Batch:
        """The step's arrays. block_size: of the cache's groups. hooked: a user's function edits the logits, so sampling
        is never plain."""
        slots, counts, rows_of = output.slots, output.counts, output.rows
        n, T = len(slots), int(counts.sum())
        starts, total = output.starts, output.starts + counts
        if n == T == np.count_nonzero(rows_of):  # one token and one row each
            query_start_loc, entry, slot_R = self._numbers[: n + 1], self._numbers[:n], slots
            positions, known, logits_indices, last = starts, total, entry, True
            sample_index = total - self.prompt_len[slots]
        else:
            query_start_loc = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
            ends = query_start_loc[1:]
            positions = np.arange(T, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
            if output.query_len > 1:
                known = positions + 1
            else:
                known = np.repeat(np.maximum(requests.num_tokens[slots], starts + output.fed), counts)
            entry = np.repeat(np.arange(n), rows_of)
            back = np.repeat(np.cumsum(rows_of), rows_of) - np.arange(len(entry))
            logits_indices, last = (ends[entry] - back).astype(np.int32), back == 1
            slot_R = slots[entry]
            sample_index = positions[logits_indices] + 1 - self.prompt_len[slot_R]
        special = self.special[slot_R] | (sample_index < self.min_tokens[slot_R])
        full = hooked or np.count_nonzero(special) > 0
        step = StepInput(
            token_ids=self._token_ids(output, requests, query_start_loc[1:], T),
            positions=positions,
            context_len=known,
            logits_indices=logits_indices,
            query_start_loc=query_start_loc,
            seq_lens=total,
            block_table=_block_table(output.tables, slots, -(-int(total.max()) // block_size)),
            # Only the row that ends a sequence's known tokens leaves a token for its next step, or one that verifies.
            slot=np.where((last | (output.query_len > 1)) & (sample_index >= 0), slot_R, self._scrap),
            draw=sample_index,
            pending=output.pending,
            query_len=output.query_len,
            **self._sampling(slot_R),
        )
        if not full:
            return Batch(step, Rows(entry, slot_R, sample_index, sample_index, sample_index[:0]), False)
        return self._full(output, step, entry, slot_R, sample_index)

    def _sampling(self, slot_R: np.ndarray) -> dict[str, np.ndarray]:
        """What plain sampling reads; most steps have the rows of the one before."""
        if not np.array_equal(slot_R, self._last_slots):
            names = ("temperature", "top_k", "top_p", "min_p", "seed")
            self._last_slots, self._last_rows = slot_R, {name: getattr(self, name)[slot_R] for name in names}
        return self._last_rows

    def _full(
        self, output: SchedulerOutput, step: StepInput, entry: np.ndarray, slot_R: np.ndarray, sample_index: np.ndarray
    ) -> Batch:
        sampling = sample_index >= 0
        wanted = np.where(sampling, self.wanted[slot_R], self.wanted_prompt[slot_R])
        masked = np.flatnonzero(sampling & (self.masked[slot_R] | (sample_index < self.min_tokens[slot_R])))
        mask_row = np.full(len(entry), -1, dtype=np.int32)
        mask_row[masked] = np.arange(len(masked))
        target = np.full(len(entry), -1, dtype=np.int32)
        for row in np.flatnonzero(~sampling):
            prompt = output.requests[entry[row]].request.prompt
            target[row] = prompt[len(prompt) + sample_index[row]]
        step = step._replace(
            counted=np.where(sampling, self.counted[slot_R], 0),
            mask_row=mask_row,
            bias_count=np.where(sampling, self.bias_count[slot_R], 0),
            repetition=self.repetition[slot_R],
            frequency=self.frequency[slot_R],
            presence=self.presence[slot_R],
            target=target,
            wanted=wanted,
        )
        return Batch(step, Rows(entry, slot_R, sample_index, wanted, masked), True)

    def _token_ids(self, output: SchedulerOutput, requests: RequestTable, ends: np.ndarray, T: int) -> np.ndarray:
        """The newest token of a sequence is looked up by slot; prompts are read from the request, drafts as well unless
        they lie on the device: then all tokens of a slot are -(slot + 1)."""
        slots = output.slots
        if len(slots) == T == np.count_nonzero(output.fed):  # all in flight
            return -(slots + 1)
        newest = np.where(output.fed, -(slots + 1), requests.last_token[slots])
        if output.query_len > 1:
            drafts = output.drafts
            if drafts is None:
                drafts = np.repeat(-(slots + 1)[:, None], output.query_len - 1, axis=1)
            return np.concatenate([newest[:, None], drafts], axis=1, dtype=np.int32).ravel()
        at_newest = output.fed | (output.starts == requests.num_tokens[slots] - 1)
        ids = np.empty(T, dtype=np.int32)
        simple = at_newest & (output.counts == 1)
        ids[ends[simple] - 1] = newest[simple]
        for i in np.flatnonzero(~simple):
            start, count, end = int(output.starts[i]), int(output.counts[i]), int(ends[i])
            ids[end - count : end] = output.requests[i].tokens(start, start + count)
        return ids


def _block_table(tables: tuple[np.ndarray, ...], slots: np.ndarray, width: int) -> np.ndarray:
    """The groups' block tables of those slots, as wide as they are filled [groups, n, width]."""
    if len(tables) == 1:
        return tables[0][slots, :width][None]
    return np.stack([table[slots, :width] for table in tables])


def _set(mask: np.ndarray, token: int, allowed: bool) -> None:
    bits = mask.view(np.uint32)
    if allowed:
        bits[token >> 5] |= np.uint32(1 << (token & 31))
    else:
        bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
