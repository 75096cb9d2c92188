"""SlotStates: the recurrent states of slots between steps: what they begin with, and the snapshots kept of them.

A model without such states has a `SlotStates`, which does nothing; one with them `RecurrentStates`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from graphllm.engine.cache.digests import PrefixHasher
from graphllm.engine.cache.hits import Hit, Retained, cached
from graphllm.engine.cache.retention import Snapshots
from graphllm.engine.requests.request_table import RequestState, RequestTable

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

    def begin(self, slot: int, snapshot: int) -> None:
        """A sequence begins in a slot, with a snapshot or, with -1, with nothing."""

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
        self, requests: Sequence[RequestState], slots: np.ndarray, ends: np.ndarray, known: np.ndarray,
        uncertain: np.ndarray | None, verified: int,
    ) -> list[tuple[int, int]]:  # fmt: skip
        """(slot, snapshot) to save after a step that takes these sequences to these ends.

        known: their known tokens.
        uncertain: the end is an upper bound; so is the end of the first ``verified`` sequences.
        """
        return []

    def store(
        self, requests: Sequence[RequestState], slots: np.ndarray, ends: np.ndarray, live: np.ndarray,
        saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        """A step has its result: make its snapshots findable, and let go of them. live: sequences that count."""

    @property
    def idle(self) -> bool:
        """No snapshot is held."""
        return True


class RecurrentStates(SlotStates):
    """Recurrent states, with a bounded number of snapshots at multiples of ``boundary`` tokens.

    interval: a snapshot is taken after about this many tokens, besides at the end of a prompt; 0: only there.

    Prompts that share a beginning and then differ, as after a common system message, get a snapshot where they part:
    the second request that finds the blocks up to there without one takes it.

    Where there is no room, the snapshot goes first that one sequence alone went on from and then left a later one, as
    the last turn of a conversation does.
    """

    forkable = False

    def __init__(
        self, num_snapshots: int, boundary: int, interval: int, caching: bool, hasher: PrefixHasher, max_num_seqs: int
    ) -> None:
        self._snapshots = Snapshots(num_snapshots, boundary, caching)
        self.pools = [self._snapshots]
        self.cacheable = num_snapshots > 0
        self._caching, self._boundary, self._hasher = caching and self.cacheable, boundary, hasher
        self._interval = -(-interval // boundary) * boundary
        self._stop = np.zeros(max_num_seqs, dtype=np.int32)  # of each slot: where its prompt parts from others
        self._origin: dict[int, tuple[int, int]] = {}  # of each slot: the snapshot it began with, see `Snapshots.load`
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

    def begin(self, slot: int, snapshot: int) -> None:
        self._origin.pop(slot, None)
        if snapshot >= 0:
            self._loads.append((snapshot, slot))
            self._origin[slot] = snapshot, self._snapshots.load(snapshot)
        else:
            self._resets.append(slot)

    def beginnings(self) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._resets, self._loads
        self._resets, self._loads = [], []
        return found

    def may_fork(self, t: RequestTable, slot: int) -> bool:
        """States are found by their snapshot, which is there when the host has seen the prompt's end."""
        return bool(t.num_tokens[slot] > t.num_prompt_tokens[slot]) or not self._caching

    def chunk_end(self, slot: int, start: int, num_tokens: int) -> int:
        """For a snapshot: the last boundary before the end of the tokens, where the prompt parts from others, and every
        interval."""
        last = (num_tokens - 1) // self._boundary * self._boundary
        if not self._caching or start >= last:
            return num_tokens
        stop = int(self._stop[slot])
        end = stop if start < stop < last else last
        return min(end, (start // self._interval + 1) * self._interval) if self._interval else end

    def reserve(
        self, requests: Sequence[RequestState], slots: np.ndarray, ends: np.ndarray, known: np.ndarray,
        uncertain: np.ndarray | None, verified: int,
    ) -> list[tuple[int, int]]:  # fmt: skip
        if not self._caching or verified == len(slots):
            return []
        wanted = ends == (known - 1) // self._boundary * self._boundary
        if self._interval:
            wanted |= ends % self._interval == 0
        wanted |= ends == self._stop[slots]
        wanted &= ends > 0
        wanted[:verified] = False  # which version of the states is valid then, nobody knows yet
        if uncertain is not None:
            wanted &= ~uncertain
        found = [(i, self._reserve(requests[i], int(ends[i]))) for i in np.flatnonzero(wanted).tolist()]
        return [(int(slots[i]), snapshot) for i, snapshot in found if snapshot >= 0]

    def _reserve(self, state: RequestState, num_tokens: int) -> int:
        """A snapshot, held, for a sequence's states after ``num_tokens``; -1 when one exists or there is no room."""
        number = num_tokens // self._hasher.block_size
        if number <= len(state.digests) and self._snapshots.known(state.digests[number - 1]):
            return -1
        return self._snapshots.reserve()

    def store(
        self, requests: Sequence[RequestState], slots: np.ndarray, ends: np.ndarray, live: np.ndarray,
        saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        for slot, snapshot in saves:
            i = int(np.flatnonzero(slots == slot)[0])
            if live[i]:
                state, end = requests[i], int(ends[i])
                self._hasher.digest(state, end)
                digest = state.digests[end // self._hasher.block_size - 1]
                self._snapshots.store(snapshot, digest, end == int(self._stop[slot]))
                if (origin := self._origin.pop(slot, None)) is not None:
                    self._snapshots.supersede(*origin)
            self._snapshots.release(snapshot)
        for snapshot, _ in loads:
            self._snapshots.release(snapshot)

    @property
    def idle(self) -> bool:
        pool = self._snapshots.pool
        return pool.free_blocks == len(pool.references) - 1
