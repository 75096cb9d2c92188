"""What the scheduler is given, its limits, and what it says of each step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphllm.engine.requests.request_table import RequestState


class DraftResults(NamedTuple):
    """What came of a step's drafts, as the device says. All None: nothing was verified.

    num_kept [n]: of a step that verifies, how many tokens of each verifying entry count; at least one.
    num_drafted [n]: how many drafts each entry had on the device; None for as many as it could.
    runs [R]: of the row that ends an entry, the length of the match that its next drafts rest on, 0 for other rows;
        None where drafts are not looked up on the device.
    """

    num_kept: np.ndarray | None = None
    num_drafted: np.ndarray | None = None
    runs: np.ndarray | None = None


NO_DRAFTS = DraftResults()


class SchedulerLimits(NamedTuple):
    """What the scheduler must keep to.

    max_num_seqs: requests that run at once.
    max_num_batched_tokens: tokens of one step.
    max_num_rows: sampled rows of one step.
    max_len: tokens of a sequence.
    block_size, snapshot_interval: see `CacheManager`.
    max_num_queued_reqs: requests that may wait; None for no limit.
    policy: "fcfs" or "priority".
    long_prefill_token_threshold: tokens of one prompt in one step; 0 for no limit.
    pipeline_depth, min_batch_per_stage: see `PipelineShare`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_rows: int
    max_len: int
    block_size: int
    max_num_queued_reqs: int | None = None
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    snapshot_interval: int = 0
    pipeline_depth: int = 1
    min_batch_per_stage: int = 1


class SchedulerOutput(NamedTuple):
    """A step's work: an entry for each of n requests, entries with one token first.

    requests, slots [n]: of the entries.
    starts, counts [n] int32: first position and number of the tokens to compute.
    rows [n] int32: how many of the last tokens are sampled from or scored.
    samples [n] bool: whether the last row gives the sequence's next token.
    fed [n] bool: the first token is still in flight and is taken from the device.
    epochs [n]: tell at `commit` whether the slot is still the request's.
    tables: block tables of all slots, for each cache group [slots, blocks].
    query_len: tokens of an entry that verifies drafts: its newest token and the drafts.
    ahead: by how many tokens such an entry may move on: query_len, or fewer where the drafts are a tree.
    verified: how many entries verify drafts; they come first.
    drafts [verified, query_len - 1] int32: negative for none; None where they lie on the device.
    pending [n] bool: starts, positions and lengths are upper bounds, which the device lowers by the drafts that the
        step in flight rejects; None where all are exact.
    num_drafts: how many drafts of each sequence the device makes after the step; None where it is not asked.
    num_independent: of how many of the newest steps in flight it takes no token.
    copies: blocks (from, to) to be copied before the step.
    resets: slots with recurrent states that become zero before the step.
    snapshot_loads: (snapshot, slot) before the step.
    snapshot_saves: (slot, snapshot) after the step; an entry for exports in the place of a slot.
    exports [n] int32: the entry to which the step exports a recurrent state from inside of each chunk, -1 for none.
        None: no chunk has one.
    admitted: requests that are new in their slot.
    """

    requests: list[RequestState]
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    samples: np.ndarray
    fed: np.ndarray
    epochs: np.ndarray
    tables: tuple[np.ndarray, ...]
    query_len: int
    ahead: int
    verified: int
    drafts: np.ndarray | None
    pending: np.ndarray | None
    num_drafts: int | None
    num_independent: int
    copies: list[tuple[int, int]]
    resets: list[int]
    snapshot_loads: list[tuple[int, int]]
    snapshot_saves: list[tuple[int, int]]
    exports: np.ndarray | None
    admitted: list[RequestState]

    def part(self, which: slice) -> SchedulerOutput:
        """Some of the entries, as `commit` looks at them."""
        names = ("requests", "slots", "starts", "counts", "rows", "samples", "fed", "epochs")
        return self._replace(**{name: getattr(self, name)[which] for name in names})
