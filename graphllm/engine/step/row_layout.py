"""RowLayout: where the tokens and the sampled rows of a step lie, from the scheduler's output."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from graphllm.engine.requests.request_table import RequestTable
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.program.schema import CacheLayout


class RowLayout(NamedTuple):
    """T tokens, R sampled rows, n entries in the scheduler's output.

    query_start_loc [n + 1]: each entry's first token.
    positions, known [T]: of each token its position, and how many tokens of its sequence are known.
    logits_indices [R]: the token of each row.
    entry, slot [R]: of each row.
    last [R]: whether a row leaves a token for the next step of its sequence; True for all.
    sample_index [R]: index of the output token that the row samples; negative for a row inside the prompt.
    place [R]: drafts of the entry before the row; None where no entry has any.
    of_drafts: further inputs of a step where drafts are verified.
    query_len: tokens of each entry, where all have as many and a row for each token; otherwise 0.
    """

    query_start_loc: np.ndarray
    positions: np.ndarray
    known: np.ndarray
    logits_indices: np.ndarray
    entry: np.ndarray
    slot: np.ndarray
    last: np.ndarray | bool
    sample_index: np.ndarray
    place: np.ndarray | None
    of_drafts: dict[str, np.ndarray]
    query_len: int


def row_layout(
    output: SchedulerOutput, requests: RequestTable, layout: CacheLayout, numbers: np.ndarray, prompt_len: np.ndarray
) -> RowLayout:
    """Of one step. numbers: 0, 1 and so on. prompt_len: tokens of each slot's prompt."""
    slots, counts, rows = output.slots, output.counts, output.rows
    n, T = len(slots), int(counts.sum())
    if n and output.verified == n and layout.tree is None:
        found = _all_verify(output, prompt_len)
    elif n == T == np.count_nonzero(rows):
        found = _one_each(output, numbers, prompt_len)
    else:
        found = _ragged(output, requests, layout, prompt_len)
    return found._replace(of_drafts=_of_drafts(output, layout, found)) if layout.query_lens else found


def _all_verify(output: SchedulerOutput, prompt_len: np.ndarray) -> RowLayout:
    """Every entry verifies a run of drafts: as many tokens and rows each."""
    slots, starts = output.slots, output.starts
    query_start_loc, entry, place, offsets = _uniform(len(slots), output.query_len)
    positions, slot_R = (starts[:, None] + offsets).ravel(), slots[entry]
    known, indices = positions + 1, np.arange(len(entry), dtype=np.int32)
    sample_index = known - prompt_len[slot_R]
    return RowLayout(
        query_start_loc, positions, known, indices, entry, slot_R, True, sample_index, place, {}, output.query_len
    )


def _one_each(output: SchedulerOutput, numbers: np.ndarray, prompt_len: np.ndarray) -> RowLayout:
    """Every entry has one token and one row."""
    slots, starts = output.slots, output.starts
    n, total = len(slots), starts + output.counts
    entry = numbers[:n]
    sample_index = total - prompt_len[slots]
    return RowLayout(numbers[: n + 1], starts, total, entry, entry, slots, True, sample_index, None, {}, 1)


def _ragged(output: SchedulerOutput, requests: RequestTable, layout: CacheLayout, prompt_len: np.ndarray) -> RowLayout:
    """Entries of any lengths; the first ones may verify drafts."""
    slots, counts, rows, starts = output.slots, output.counts, output.rows, output.starts
    T = int(counts.sum())
    query_start_loc = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
    ends = query_start_loc[1:]
    positions = np.arange(T, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
    verified = output.verified * output.query_len  # tokens, and rows
    if layout.tree is not None and verified:
        positions[:verified] = (starts[: output.verified, None] + np.array(layout.tree.depths)).ravel()
    known = np.repeat(np.maximum(requests.num_tokens[slots], starts + output.fed), counts)
    known[:verified] = positions[:verified] + 1
    entry = np.repeat(np.arange(len(slots)), rows)
    back = np.repeat(np.cumsum(rows), rows) - np.arange(len(entry))
    # Only the row that ends a sequence's known tokens leaves a token for its next step, or one that verifies.
    indices, last = (ends[entry] - back).astype(np.int32), back == 1
    last[:verified] = True
    place = np.zeros(len(entry), dtype=np.int32)
    place[:verified] = output.query_len - back[:verified]
    slot_R = slots[entry]
    sample_index = positions[indices] + 1 - prompt_len[slot_R]
    n, R = len(slots), len(entry)
    query_len = int(n == T == R) if output.verified < n else output.query_len
    return RowLayout(
        query_start_loc, positions, known, indices, entry, slot_R, last, sample_index, place, {}, query_len
    )


def _of_drafts(output: SchedulerOutput, layout: CacheLayout, rows: RowLayout) -> dict[str, np.ndarray]:
    """What the device needs to resolve and to accept drafts; see `resolve_drafts` and `accept_drafts`."""
    n = len(output.slots)
    if rows.last is True:  # each token has a row
        found = {"sequence_ids": rows.entry, "row_start_loc": rows.query_start_loc}
    else:
        found = {
            "sequence_ids": np.repeat(np.arange(n, dtype=np.int32), output.counts),
            "row_start_loc": np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(output.rows, dtype=np.int32)]),
        }
    none = output.pending is None
    found["pending"] = np.zeros(n, dtype=np.int32) if none else output.pending.astype(np.int32)  # type: ignore[union-attr]
    if output.verified and rows.place is not None:
        found["draft_place"] = rows.place
    if output.verified and layout.tree is not None:
        found["ancestors"] = np.tile(np.array(layout.tree.ancestors, dtype=np.int64), output.verified)
    return found


@functools.lru_cache
def _uniform(n: int, query_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of n sequences with query_len tokens and rows each: the first token of each one; the sequence of each row; the
    row's place in it; the places of one sequence."""
    places = np.arange(query_len, dtype=np.int32)
    begin = np.arange(0, (n + 1) * query_len, query_len, dtype=np.int32)
    entry, place = np.repeat(np.arange(n, dtype=np.int32), query_len), np.tile(places, n)
    for shared in (begin, entry, place, places):
        shared.setflags(write=False)
    return begin, entry, place, places
