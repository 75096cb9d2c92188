"""GuessTracker: on what run each running request's guess rests, and what came of the guesses before."""

from __future__ import annotations

import numpy as np

from graphllm.engine.guess_runs import ENDED, GuessRuns
from graphllm.engine.request_table import RequestState, RequestTable
from graphllm.engine.scheduler_output import SchedulerOutput


class GuessTracker:
    """Keeps the column ``run`` of the requests, and has ``runs`` learn. Where the device looks drafts up, it tells with
    each step's tokens on what the next ones rest; of a proposer a run is how many tokens it has guessed right in a row,
    and one more."""

    def __init__(self, requests: RequestTable, runs: GuessRuns) -> None:
        self._requests, self._runs = requests, runs
        self._proposals: list[tuple[int, int, bool, int]] = []  # what came of them, for `GuessRuns.verified`

    def follow(
        self, output: SchedulerOutput, known: np.ndarray, before: np.ndarray, runs: np.ndarray,
        num_kept: np.ndarray | None, live: np.ndarray, ended: list[int],
    ) -> None:  # fmt: skip
        """A step of a device that looks drafts up has given its tokens. known, before [n]: of each entry, its tokens
        and its run before them. runs [R]: of each row, as the device tells. num_kept, live: see `Scheduler.commit`.
        ended: slots of requests that are done with it."""
        t, slots, v = self._requests, output.slots, output.verified
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
            last = np.minimum(kept, t.num_tokens[slots[:v]] - known[:v])  # what comes behind the end is no text
            missed = (kept < output.ahead) | (now[:v] == ENDED)
            self._runs.verified(before[:v], last - 1, missed, now[:v])
        if v < len(slots):
            self._runs.stepped(before[v:], now[v:])

    def proposed(self, state: RequestState, drafts: list[int]) -> None:
        """A request's next tokens were guessed anew."""
        self._judge(state, drafts, ended=False)

    def ended(self, state: RequestState) -> None:
        """Of a request there will be no more."""
        self._judge(state, [], ended=True)

    def _judge(self, state: RequestState, drafts: list[int], ended: bool) -> None:
        (guess, at), state.guess = state.guess, (drafts, len(state.output))
        if state.slot < 0:
            return
        before = int(self._requests.run[state.slot])
        same = [a == b for a, b in zip(guess, state.output[at:], strict=False)]
        right = same.index(False) if False in same else len(same)
        missed = right < len(same) or not before
        now = ENDED if ended else 0 if not drafts else 1 if missed else before + right
        self._requests.run[state.slot] = now
        if same or not before:
            self._proposals.append((before, min(right, len(same) - 1) if ended else right, missed or ended, now))

    def learn(self) -> None:
        """From what came of proposals since the last time."""
        if self._proposals:
            before, right, missed, now = np.array(self._proposals).T
            self._runs.verified(before, right, missed > 0, now)
            self._proposals = []


def _of_entries(runs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Of a step's entries, each with so many rows, the run of the row that has one."""
    if len(runs) == len(rows) == np.count_nonzero(rows):
        return runs
    found, some = np.zeros(len(rows), dtype=runs.dtype), np.flatnonzero(rows)
    if len(some):
        found[some] = np.maximum.reduceat(runs, (np.cumsum(rows) - rows)[some])
    return found
