"""On what run each request's guess rests that the device looks up, and what came of the guesses before."""

from __future__ import annotations

import numpy as np

from graphllm.engine.drafts.match_lengths import ENDED, MatchLengths
from graphllm.engine.requests.request_table import RequestTable
from graphllm.engine.schedule.scheduler_output import SchedulerOutput


def follow_guesses(
    t: RequestTable, learner: MatchLengths, output: SchedulerOutput, known: np.ndarray, before: np.ndarray,
    runs: np.ndarray, num_kept: np.ndarray | None, live: np.ndarray, ended: list[int],
) -> None:  # fmt: skip
    """A step has given its tokens: keep the column ``run`` of the requests, and have ``learner`` learn of it. known,
    before [n]: of each entry, its tokens and its run before them. runs [R]: of each row, as the device tells with the
    tokens. num_kept, live: see `Scheduler.commit`. ended: slots of requests that are done with it."""
    slots, v = output.slots, output.verified
    now = runs.reshape(v, -1).max(axis=1) if 0 < v == len(slots) else _of_entries(runs, output.rows)
    got = live & output.samples
    if ended:
        now = np.where(np.isin(slots, ended), ENDED, now)
    kept = None if num_kept is None else num_kept[:v]
    if np.count_nonzero(got) < len(got):
        kept = None if kept is None else kept[got[:v]]
        v = int(np.count_nonzero(got[:v]))
        slots, known, before, now = slots[got], known[got], before[got], now[got]
    t.run[slots] = now
    if v and kept is not None:
        last = np.minimum(kept, t.num_tokens[slots[:v]] - known[:v])  # what comes after the end is no text
        missed = (kept < output.ahead) | (now[:v] == ENDED)
        learner.verified(before[:v], last - 1, missed, now[:v])
    if v < len(slots):
        learner.stepped(before[v:], now[v:])


def _of_entries(runs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Of a step's entries, the run of the row that has one. rows: of each entry."""
    if len(runs) == len(rows) == np.count_nonzero(rows):
        return runs
    found, some = np.zeros(len(rows), dtype=runs.dtype), np.flatnonzero(rows)
    if len(some):
        found[some] = np.maximum.reduceat(runs, (np.cumsum(rows) - rows)[some])
    return found
