"""SlotStates: the recurrent states of slots between steps: what they begin with, and the snapshots kept of them.

A model without such states has a `SlotStates`, which does nothing; one with them `RecurrentStates`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphllm.engine.cache.digests import PrefixHasher
from graphllm.engine.cache.hits import Hit, Retained, cached
from graphllm.engine.cache.retention import Mark, Snapshots
from graphllm.engine.requests.request_table import RequestState, RequestTable
from graphllm.program.schema import CacheLayout

_BRANCHES = 4096  # digests that are remembered


class SlotStates:
    """No state outlives a step but in blocks.

    pools: of snapshots, none or one.
    cacheable: a beginning can be found again.
    forkable: a sequence can go on from blocks of another one that still runs.
    """

    pools: Sequence[Snapshots] = ()
    cacheable = True
    forkable = True

    def found(self, entries: Sequence[int], end: int) -> int:
        """The snapshot after ``end`` tokens, from the result of `Snapshots.find`; -1 for none."""
        return -1

    def release(self, snapshot: int) -> None:
        """Let go of a snapshot; nothing for -1."""

    def enter(self, slot: int, snapshot: int, branch: int) -> None:
        """A sequence enters a slot; keep its snapshot, -1 for none, until that is released. branch: see `Hit`."""

    def begin(self, state: RequestState, snapshot: int) -> None:
        """A sequence begins in its slot, with a snapshot or, with -1, with nothing."""

    def leave(self, slot: int) -> None:
        """The slot is free again."""

    def compared(self, hit: Hit, groups: Sequence[Retained], state: RequestState, end: int) -> Hit:
        """A hit, with what the blocks of these groups alone would give of at most ``end`` tokens."""
        return hit

    def beginnings(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Slots to zero before the next step, and (snapshot, slot) to load. Each is returned once."""
        return [], []

    def may_fork(self, t: RequestTable, slot: int) -> bool:
        """Whether the prompt of a sequence can be shared: it is computed, or in a step that comes before."""
        return bool(t.num_computed_tokens[slot] >= t.num_prompt_tokens[slot])

    def chunk_end(self, slot: int, start: int, num_tokens: int) -> int:
        """Where the next chunk of a slot ends at the latest. num_tokens: known tokens."""
        return num_tokens

    def reserve(
        self, requests: Sequence[RequestState], slots: np.ndarray, starts: np.ndarray, ends: np.ndarray,
        known: np.ndarray, uncertain: np.ndarray | None, verified: int,
    ) -> tuple[list[tuple[int, int]], np.ndarray | None]:  # fmt: skip
        """(slot, snapshot) to save after a step that takes these sequences from these starts to these ends; an entry
        for exports may take the place of a slot. Then the entry to which each sequence exports, see `SchedulerOutput`.

        known: their known tokens.
        uncertain: the end is an upper bound; so is the end of the first ``verified`` sequences.
        """
        return [], None

    def store(
        self, requests: Sequence[RequestState], slots: np.ndarray, ends: np.ndarray, live: np.ndarray,
        saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        """A step has its result: make its snapshots findable, and let go of them. live: sequences that count."""

    @property
    def idle(self) -> bool:
        """No sequence has states, and no snapshot is held."""
        return True


@dataclass
class _Left:
    """Snapshots of a running sequence.

    state: of the request.
    origin: what it went on from.
    prompt: the last before its prompt's end.
    newest: one that moves on with it, for its next turn.
    """

    state: RequestState
    origin: Mark | None = None
    prompt: Mark | None = None
    newest: Mark | None = None

    @property
    def earlier(self) -> Mark | None:
        """The nearest before the newest one."""
        return self.prompt or self.origin


class RecurrentStates(SlotStates):
    """Recurrent states, with a bounded number of snapshots at multiples of ``boundary`` tokens.

    interval: a snapshot is taken after about this many tokens, besides at the ends of prompts and requests; 0: only
    there.

    Prompts that share a beginning and then differ, as after a common system message, get a snapshot where they part:
    the second request that finds the blocks up to there without one takes it.

    A request's end is not known beforehand, so a sequence that passes a boundary writes its newest snapshot again.

    A snapshot at a prompt's last boundary ends a chunk, unless the step can export the state from inside of the chunk:
    where the last border of the chunk, see `CacheLayout`, is a boundary too.

    Where there is no room, superseded snapshots go first: one that a single sequence went on from and left a later one;
    the newest of a sequence that has one at its prompt's end, until it has its answer; from then on the latter. Where a
    tier rescues what goes, any other one goes then, too, and superseded ones are not worth a copy.
    """

    forkable = False

    def __init__(
        self, layout: CacheLayout, boundary: int, interval: int, caching: bool, hasher: PrefixHasher, max_num_seqs: int
    ) -> None:
        self._snapshots = Snapshots(layout.num_snapshots, boundary, caching)
        self.pools = [self._snapshots]
        self.cacheable = layout.num_snapshots > 0
        # A window leaves blocks before a step that computes past a border makes them findable.
        windows = any(group.retention == "window" for group in layout.groups)
        self._exports, self._border = () if windows else layout.exports, layout.border
        self._promised = 0  # exports of the step that is planned
        self._exported: dict[int, tuple[int, int]] = {}  # by reserved snapshot: slot, and tokens before the border
        self._caching, self._boundary, self._hasher = caching and self.cacheable, boundary, hasher
        self._interval = -(-interval // boundary) * boundary
        self._stop = np.zeros(max_num_seqs, dtype=np.int32)  # of each slot: where its prompt parts from others
        self._left: dict[int, _Left] = {}  # by slot
        self._replaced: dict[int, Mark] = {}  # by reserved snapshot: the one that it supersedes when it is written
        self._seen: OrderedDict[bytes, str] = OrderedDict()  # digests, with the first request that found them
        self._resets: list[int] = []
        self._loads: list[tuple[int, int]] = []

    def found(self, entries: Sequence[int], end: int) -> int:
        return entries[end // self._boundary - 1] - 1

    def enter(self, slot: int, snapshot: int, branch: int) -> None:
        self._stop[slot] = branch
        if snapshot >= 0:
            self._snapshots.hold(snapshot)

    def release(self, snapshot: int) -> None:
        if snapshot >= 0:
            self._snapshots.release(snapshot)

    def compared(self, hit: Hit, groups: Sequence[Retained], state: RequestState, end: int) -> Hit:
        size = self._hasher.block_size
        common = cached(groups, state.digests, end, size, self._boundary).num_tokens if groups else 0
        if common <= hit.num_tokens:
            return hit
        again = self._is_branch(state.digests[common // size - 1], state.request.id)
        return hit._replace(without_state=common - hit.num_tokens, branch=common if again else 0)

    def _is_branch(self, digest: bytes, request: str) -> bool:
        """Whether the blocks up to this digest have been found without a snapshot for another request, too."""
        first = self._seen.setdefault(digest, request)
        self._seen.move_to_end(digest)
        if len(self._seen) > _BRANCHES:
            self._seen.popitem(last=False)
        return first != request

    def begin(self, state: RequestState, snapshot: int) -> None:
        self._left[state.slot] = left = _Left(state)
        if snapshot >= 0:
            self._loads.append((snapshot, state.slot))
            left.origin = self._snapshots.load(snapshot)
        else:
            self._resets.append(state.slot)

    def leave(self, slot: int) -> None:
        left, snapshots = self._left.pop(slot, None), self._snapshots
        if left is None:
            return
        newest, earlier, done = left.newest, left.earlier, left.state.finish_reason in ("stop", "length")
        if left.origin is not None and not (done and (newest or left.prompt)):
            snapshots.unload(left.origin)  # its request comes again, or goes on from there
        if done and newest is not None and earlier is not None and snapshots.keep(newest):
            if snapshots.is_held(newest):  # it is being written
                self._replaced[newest.snapshot] = earlier
            else:
                snapshots.supersede(earlier)

    def beginnings(self) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._resets, self._loads
        self._resets, self._loads = [], []
        return found

    def may_fork(self, t: RequestTable, slot: int) -> bool:
        """States are found by their snapshot, which is there when the host has seen the prompt's end."""
        return bool(t.num_tokens[slot] > t.num_prompt_tokens[slot]) or not self._caching

    def chunk_end(self, slot: int, start: int, num_tokens: int) -> int:
        """For a snapshot: the last boundary before the end of the tokens, where the prompt parts from others, and every
        interval. The end of the tokens, where the step can export the state at the last boundary."""
        last = (num_tokens - 1) // self._boundary * self._boundary
        if not self._caching or start >= last:
            return num_tokens
        stop = int(self._stop[slot])
        end = stop if start < stop < last else last
        if self._interval:
            end = min(end, (start // self._interval + 1) * self._interval)
        if end == last and self._promised < len(self._exports) and self._border_in(start, num_tokens):
            self._promised += 1
            return num_tokens
        return end

    def _border_in(self, start: int, end: int) -> int:
        """The last border of a chunk, 0 if it is no boundary or the chunk has none inside."""
        border = start + (end - start - 1) // self._border * self._border
        return border if start < border and border % self._boundary == 0 else 0

    def reserve(
        self, requests: Sequence[RequestState], slots: np.ndarray, starts: np.ndarray, ends: np.ndarray,
        known: np.ndarray, uncertain: np.ndarray | None, verified: int,
    ) -> tuple[list[tuple[int, int]], np.ndarray | None]:  # fmt: skip
        self._promised = 0
        if not self._caching or verified == len(slots):
            return [], None
        last = (known - 1) // self._boundary * self._boundary
        wanted = (ends == last) | (ends == self._stop[slots]) | ((ends >= known) & (ends % self._boundary == 0))
        if self._interval:
            wanted |= ends % self._interval == 0
        wanted &= ends > 0
        wanted[:verified] = False  # which version of the states is valid then, nobody knows yet
        if uncertain is not None:
            wanted &= ~uncertain
        found, exports = self._reserve_exports(requests, slots, starts, ends, known, verified)
        for i in np.flatnonzero(wanted).tolist():
            slot, end, prompt_end = int(slots[i]), int(ends[i]), bool(ends[i] == last[i])
            left, number = self._left[slot], end // self._hasher.block_size
            if number <= len(digests := requests[i].digests) and self._snapshots.known(digests[number - 1]):
                continue
            passing = end >= known[i] and not (self._interval and end % self._interval == 0)
            snapshot = self._reserve_newest(left) if passing else self._reserve_kept(left, prompt_end)
            if snapshot >= 0:
                found.append((slot, snapshot))
        return found, exports

    def _reserve_exports(
        self, requests: Sequence[RequestState], slots: np.ndarray, starts: np.ndarray, ends: np.ndarray,
        known: np.ndarray, verified: int,
    ) -> tuple[list[tuple[int, int]], np.ndarray | None]:  # fmt: skip
        """What prompts export from inside of their last chunks."""
        ending = (ends - starts > self._border) & (ends == known)
        ending[:verified] = False
        if not (self._exports and np.count_nonzero(ending)):
            return [], None
        found = list[tuple[int, int]]()
        exports = np.full(len(slots), -1, dtype=np.int32)
        for i in np.flatnonzero(ending).tolist():
            slot, border = int(slots[i]), self._border_in(int(starts[i]), int(ends[i]))
            number = border // self._hasher.block_size
            digests = requests[i].digests
            if not border or len(found) == len(self._exports):
                continue
            if number <= len(digests) and self._snapshots.known(digests[number - 1]):
                continue
            snapshot = self._reserve_kept(self._left[slot], prompt_end=True)
            if snapshot >= 0:
                exports[i] = self._exports[len(found)]
                self._exported[snapshot] = slot, border
                found.append((int(exports[i]), snapshot))
        return found, exports if found else None

    def _reserve_kept(self, left: _Left, prompt_end: bool) -> int:
        """A snapshot that stays, held; -1 when there is no room. What the sequence began with is superseded."""
        snapshot = self._snapshots.reserve(evict=True)
        if snapshot < 0:
            return -1
        self._replaced.pop(snapshot, None)
        if left.origin is not None:
            self._replaced[snapshot] = left.origin
        if prompt_end:
            left.prompt = self._snapshots.mark(snapshot)
        return snapshot

    def _reserve_newest(self, left: _Left) -> int:
        """A snapshot that the sequence may write again later, held; -1 when there is no room to spare. Others may have
        it unless it is the only one of the sequence."""
        snapshots, newest = self._snapshots, left.newest
        if newest is not None and snapshots.rewrite(newest):
            snapshot = newest.snapshot
        else:
            snapshot = snapshots.reserve(evict=snapshots.rescued or (newest is None and left.earlier is None))
            if snapshot >= 0 and newest is not None:
                snapshots.supersede(newest)
        if snapshot < 0:
            if left.earlier is not None:
                snapshots.keep(left.earlier)
            return -1
        self._replaced.pop(snapshot, None)
        left.newest = snapshots.mark(snapshot)
        if left.earlier is not None:
            snapshots.spare(left.newest)
        return snapshot

    def store(
        self, requests: Sequence[RequestState], slots: np.ndarray, ends: np.ndarray, live: np.ndarray,
        saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        for slot, snapshot in saves:
            slot, border = self._exported.pop(snapshot, (slot, 0))
            i = int(np.flatnonzero(slots == slot)[0])
            state, end = requests[i], border or int(ends[i])
            replaced = self._replaced.pop(snapshot, None)
            # A request that left after the step began has states, too, as far as its tokens are known.
            left, number = state.slot != slot and state.finish_reason != "error", end // self._hasher.block_size
            if live[i] or left:
                self._hasher.digest(state, end)
            if (live[i] or left) and number <= len(state.digests):  # a digest may need a token more than there is
                shared = bool(live[i]) and end == int(self._stop[slot])
                self._snapshots.store(snapshot, state.digests[number - 1], shared)
                if replaced is not None:
                    self._snapshots.supersede(replaced)
            self._snapshots.release(snapshot)
        for snapshot, _ in loads:
            self._snapshots.release(snapshot)

    @property
    def idle(self) -> bool:
        pool = self._snapshots.pool
        return not self._left and pool.free_blocks == len(pool.references) - 1
