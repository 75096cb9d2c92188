"""From a plan to arrays: what the sampling program must know of every running request, by slot, and one step's
input."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from typing import NamedTuple

import numpy as np

from graphllm.engine.scheduler import Plan, Scheduler, Sequence
from graphllm.runtime.staging import StepInput

_FULL = -1  # all bits set
_INT32 = 2**31 - 1
IN_PROMPT = 1 << 30  # flag of `adjust_logits` in the counts
_NO_SLOTS = np.array([-1], dtype=np.int32)  # equal to those of no step


class Rows(NamedTuple):
    """The sampled rows of a step, in order. R rows, n sequences in the plan.

    entry [R]: which sequence of the plan. slot [R]. draw [R]: index of the output token the row samples; negative for a
    row inside the prompt, which only scores the next prompt token. wanted [R]: top log-probabilities wanted, -1: none
    at all. masked: rows that have a mask, in the order of the mask's rows.
    """

    entry: np.ndarray
    slot: np.ndarray
    draw: np.ndarray
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

    def admit(self, sequence: Sequence, always_masked: bool) -> bool:
        """Fill a slot; whether it has state on the device, penalties or bias. always_masked: each of its rows has a
        mask of its own (a grammar, bad words of several tokens)."""
        slot, request, p = sequence.slot, sequence.request, sequence.request.params
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

    def states(
        self, prompt: Sequence_[int], output: Sequence_[int], bias: Mapping[int, float]
    ) -> dict[str, np.ndarray]:
        """What a slot's states begin with: penalty counts for both lists, and the logit bias."""
        counts = np.zeros(self._vocab, dtype=np.int32)
        np.add.at(counts, np.asarray(output, dtype=np.int64), 1)
        counts[np.asarray(prompt, dtype=np.int64)] |= IN_PROMPT
        tokens, values = np.array(list(bias), dtype=np.int32), np.array(list(bias.values()), dtype=np.float32)
        return {"counts": counts, "bias_token": tokens, "bias_value": values}

    def mask_row(self, row: np.ndarray, slot: int, sequence: Sequence, draw: int) -> None:
        """Write the mask [words] of everything but a grammar: allowed ids, bad words, and no stop before min_tokens.

        row holds what is allowed so far and is narrowed.
        """
        base = self._base.get(slot)
        if base is not None:
            row &= base
        request, output = sequence.request, sequence.output
        for *before, last in (words for words in request.bad_words if len(words) > 1):
            if output[-len(before) :] == before:
                _set(row, last, False)
        if draw < request.params.min_tokens:
            narrowed = row.copy()
            for token in request.stop_ids:
                _set(narrowed, token, False)
            if narrowed.any():  # a grammar that is complete allows nothing but its end
                row[:] = narrowed

    def stage(self, plan: Plan, scheduler: Scheduler, hooked: bool) -> Batch:
        """The step's arrays. hooked: a user's function edits the logits, so sampling is never plain."""
        slots, counts, rows_of = plan.slots, plan.counts, plan.rows
        n, T = len(slots), int(counts.sum())
        starts, total = plan.starts, plan.starts + counts
        if n == T == np.count_nonzero(rows_of):  # one token and one row each
            query_start_loc, entry, slot_R = self._numbers[: n + 1], self._numbers[:n], slots
            positions, known, logits_indices, last = starts, total, entry, True
            draw = total - self.prompt_len[slots]
        else:
            query_start_loc = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
            ends = query_start_loc[1:]
            positions = np.arange(T, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
            known = np.repeat(scheduler.known[slots] + plan.fed, counts)
            entry = np.repeat(np.arange(n), rows_of)
            back = np.repeat(np.cumsum(rows_of), rows_of) - np.arange(len(entry))
            logits_indices, last = (ends[entry] - back).astype(np.int32), back == 1
            slot_R = slots[entry]
            draw = positions[logits_indices] + 1 - self.prompt_len[slot_R]
        special = self.special[slot_R] | (draw < self.min_tokens[slot_R])
        full = hooked or np.count_nonzero(special) > 0
        width = -(-int(total.max()) // scheduler.block_size)
        arrays = {
            "token_ids": self._token_ids(plan, scheduler, query_start_loc[1:], T),
            "positions": positions,
            "context_lens": known,
            "logits_indices": logits_indices,
            "query_start_loc": query_start_loc,
            "seq_lens": total,
            "slots": slots,
            **{f"block_table.{g}": table[slots, :width] for g, table in enumerate(plan.tables)},
            # Only the row that ends a sequence's known tokens leaves a token for its next step.
            "row_slots": np.where(last & (draw >= 0), slot_R, self._scrap),
            "sample_index": draw,
            **self._sampling(slot_R),
        }
        step = StepInput(T, n, len(logits_indices), int(n == T == len(logits_indices)), arrays)
        if not full:
            return Batch(step, Rows(entry, slot_R, draw, draw, draw[:0]), False)
        return self._full(plan, step, entry, slot_R, draw)

    def _sampling(self, slot_R: np.ndarray) -> dict[str, np.ndarray]:
        """What plain sampling reads; most steps have the rows of the one before."""
        if not np.array_equal(slot_R, self._last_slots):
            names = ("temperature", "top_k", "top_p", "min_p", "seed")
            self._last_slots, self._last_rows = slot_R, {name: getattr(self, name)[slot_R] for name in names}
        return self._last_rows

    def _full(self, plan: Plan, step: StepInput, entry: np.ndarray, slot_R: np.ndarray, draw: np.ndarray) -> Batch:
        sampling = draw >= 0
        wanted = np.where(sampling, self.wanted[slot_R], self.wanted_prompt[slot_R])
        masked = np.flatnonzero(sampling & (self.masked[slot_R] | (draw < self.min_tokens[slot_R])))
        mask_row = np.full(len(entry), -1, dtype=np.int32)
        mask_row[masked] = np.arange(len(masked))
        target = np.full(len(entry), -1, dtype=np.int32)
        for row in np.flatnonzero(~sampling):
            prompt = plan.sequences[entry[row]].request.prompt
            target[row] = prompt[len(prompt) + draw[row]]
        edits = {
            "counted": np.where(sampling, self.counted[slot_R], 0),
            "mask_row": mask_row,
            "bias_count": np.where(sampling, self.bias_count[slot_R], 0),
            "repetition_penalty": self.repetition[slot_R],
            "frequency_penalty": self.frequency[slot_R],
            "presence_penalty": self.presence[slot_R],
            "target": target,
            "wanted": wanted,
        }
        step = step._replace(arrays={**step.arrays, **edits})
        return Batch(step, Rows(entry, slot_R, draw, wanted, masked), True)

    def _token_ids(self, plan: Plan, scheduler: Scheduler, ends: np.ndarray, T: int) -> np.ndarray:
        """The newest token of a sequence is looked up by slot; prompts and drafts are read from the sequence."""
        slots = plan.slots
        if len(slots) == T == np.count_nonzero(plan.fed):  # all in flight
            return -(slots + 1)
        newest = np.where(plan.fed, -(slots + 1), scheduler.last_token[slots])
        at_newest = plan.starts == scheduler.known[slots] + plan.fed - 1
        ids = np.empty(T, dtype=np.int32)
        simple = at_newest & (plan.counts == 1)
        ids[ends[simple] - 1] = newest[simple]
        for i in np.flatnonzero(~simple):
            sequence, start, count, end = plan.sequences[i], int(plan.starts[i]), int(plan.counts[i]), int(ends[i])
            ids[end - count : end] = sequence.tokens(start, start + count)
        return ids


def _set(mask: np.ndarray, token: int, allowed: bool) -> None:
    bits = mask.view(np.uint32)
    if allowed:
        bits[token >> 5] |= np.uint32(1 << (token & 31))
    else:
        bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
