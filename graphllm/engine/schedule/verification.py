"""Verification: whether a step verifies drafts, how many of each request, and what came of them. No torch.

The scheduler has one without drafts; the part `Drafts` gives it a `DraftPlanner`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphllm.engine.drafts.acceptance import Acceptance
from graphllm.engine.requests.request_table import RequestTable
from graphllm.engine.schedule.match_tracker import follow_guesses
from graphllm.engine.schedule.scheduler_output import SchedulerLimits, SchedulerOutput
from graphllm.program.schema import CacheLayout

_NO_COUNTS = np.zeros(0, dtype=np.int32)


class Given(NamedTuple):
    """What is known of a step's entries before they get its tokens.

    drafted [verified]: drafts of each entry that verifies.
    known, runs [n]: of each entry, its tokens and the run of its guess; None where the device looks up no drafts.
    """

    drafted: np.ndarray
    known: np.ndarray | None = None
    runs: np.ndarray | None = None


_NOTHING = Given(_NO_COUNTS)


class Verification:
    """No step verifies drafts."""

    def query_len(self, slots: np.ndarray, known: np.ndarray, budget: int) -> int:
        """Tokens for each of these slots; all of them decode: 1, or a compiled query length. known [n]: their tokens.
        budget: tokens that the step may have for them."""
        return 1

    def drafts(self, slots: np.ndarray, query_len: int) -> np.ndarray | None:
        """Of a step that verifies: drafts [n, query_len - 1], negative for none; None where the host has them not."""
        return None

    def made(self, slots: np.ndarray) -> int | None:
        """How many drafts the device makes after the step for each of these slots; None where it is not asked."""
        return None

    def given(
        self, output: SchedulerOutput, live: np.ndarray, num_kept: np.ndarray | None, num_drafted: np.ndarray | None,
        runs: np.ndarray | None,
    ) -> Given:  # fmt: skip
        """A step has its result, and its requests do not know of it yet; see `Scheduler.commit`."""
        return _NOTHING

    def taken(
        self, output: SchedulerOutput, live: np.ndarray, num_kept: np.ndarray | None, runs: np.ndarray | None,
        given: Given, ended: list[int],
    ) -> None:  # fmt: skip
        """The requests have their tokens. ended: slots of requests that are done."""


class DraftPlanner(Verification):
    """Verifies what pays.

    on_device: every sequence that has sampled a token has drafts on the device.
    late: drafts of the host come when the step before is done; what `RequestTable.propose` had the last time says how
    many there may be.
    verify_at_most: sequences of a step that verifies; None: as it pays.
    """

    def __init__(
        self, layout: CacheLayout, limits: SchedulerLimits, table: RequestTable, on_device: bool = False,
        late: bool = False, verify_at_most: int | None = None,
    ) -> None:  # fmt: skip
        self._layout, self._limits, self._table = layout, limits, table
        self._query_lens, self._on_device, self._late = tuple(sorted(layout.query_lens)), on_device, late
        self._guessing = layout.history > 0  # the device looks drafts up in what was said
        self.acceptance = Acceptance(self.most_drafts, verify_at_most)

    @property
    def most_drafts(self) -> int:
        """Of a sequence in a step, in a row."""
        return self._layout.ahead(max(self._query_lens, default=1)) - 1

    def query_len(self, slots: np.ndarray, known: np.ndarray, budget: int) -> int:
        """Above 1 when there are drafts, all may have them, and there is room for it. Drafts past a request's limit
        are computed for nothing, which costs less than a step of its own for the others. How many a draft model has
        made was decided with the step before."""
        t, limits, n = self._table, self._limits, len(slots)
        if not self._query_lens or self.acceptance.off(n):
            return 1
        drafts = self._there_are(slots)
        if drafts <= 0 or not t.verifiable[slots].all() or (known <= t.num_prompt_tokens[slots]).any():
            return 1
        room = min(budget // n, limits.max_num_rows // n, limits.max_len - int(known.max()))
        fitting = [q for q in self._query_lens if 1 < q <= room]
        enough = next((i + 1 for i, q in enumerate(fitting) if q > drafts), len(fitting))
        fitting = fitting[:enough]
        if not fitting:
            return 1
        if self._guessing:
            runs, ahead = t.run[slots].tolist(), t.num_in_flight[slots].tolist()
            return self.acceptance.best(n, fitting, runs=runs, ahead=ahead)
        if self._late:
            return self.acceptance.best(n, fitting, np.count_nonzero(t.num_drafts[slots]) / n)
        return fitting[-1]  # drafts that somebody proposes by hand are verified whatever came of others

    def _there_are(self, slots: np.ndarray) -> int:
        """Drafts of a sequence at most."""
        t = self._table
        if self._guessing:
            return self.most_drafts
        if self._on_device:
            return int(t.num_made[slots].min())
        if not np.count_nonzero(t.num_drafts):
            return 0
        flying = 0 if self._late else t.num_in_flight[slots]
        return int((t.num_drafts[slots] - flying).max())

    def drafts(self, slots: np.ndarray, query_len: int) -> np.ndarray | None:
        """Proposed ones."""
        return None if self._on_device or self._late else self._table.drafts(slots, query_len - 1)

    def made(self, slots: np.ndarray) -> int | None:
        """As many as it pays to verify."""
        if self._guessing or not self._on_device:
            return None
        count = self.acceptance.best(len(self._table.running), self._query_lens) - 1
        self._table.num_made[slots] = count
        return count

    def given(
        self, output: SchedulerOutput, live: np.ndarray, num_kept: np.ndarray | None, num_drafted: np.ndarray | None,
        runs: np.ndarray | None,
    ) -> Given:  # fmt: skip
        """Learns which drafts were right."""
        v, t, known, before = output.verified, self._table, None, None
        if runs is not None:
            known, before = t.num_tokens[output.slots], t.run[output.slots]
        if not v or num_kept is None:
            return Given(_NO_COUNTS, known, before)
        drafted = np.full(v, output.ahead - 1) if num_drafted is None else num_drafted[:v]
        if before is not None:
            drafted = drafted * (before[:v] > 0)
        if output.drafts is not None:  # the device takes those that there are not for tokens
            drafted = (output.drafts >= 0).sum(axis=1)
        self.acceptance.learn(num_kept[:v][live[:v]], drafted[live[:v]])
        return Given(drafted, known, before)

    def taken(
        self, output: SchedulerOutput, live: np.ndarray, num_kept: np.ndarray | None, runs: np.ndarray | None,
        given: Given, ended: list[int],
    ) -> None:  # fmt: skip
        """Learns how guesses go on."""
        if runs is not None and given.known is not None and given.runs is not None:
            kept, learner = num_kept if output.verified else None, self.acceptance.runs
            follow_guesses(self._table, learner, output, given.known, given.runs, runs, kept, live, ended)
