"""CacheManager: which blocks and snapshots each running sequence has, and which ones a later request may share.

Cache groups of unlike block sizes draw from one pool of equal blocks. What is shared is found by digests at multiples
of ``block_size`` tokens, the smallest group's; a beginning that is found ends at a multiple of ``boundary``, the
largest group's, where every group has its blocks and recurrent states have a snapshot. No policy: whether to preempt
when blocks are missing is the scheduler's business.
"""

from __future__ import annotations

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.cache.block_pool import BlockPool
from graphllm.engine.cache.digests import PrefixHasher
from graphllm.engine.cache.hits import Hit, Retained, cached
from graphllm.engine.cache.retention import NEVER, FullBlocks, WindowBlocks
from graphllm.engine.cache.slot_states import RecurrentStates, SlotStates
from graphllm.engine.requests.request_table import RequestState
from graphllm.program.schema import CacheLayout

_STORED_AT_ONCE = 4  # blocks of an output
_SHARED = -1  # in `reach`: the slot must get a block of its own before it writes


class CacheManager:
    """Blocks and snapshots of running sequences, and prefixes that they share.

    max_num_seqs: slots.
    max_len: tokens of a sequence at most.
    step_tokens: tokens of a step at most.
    block_size: of the smallest group; for a model without groups, tokens between snapshots.
    snapshot_interval: see `RecurrentStates`.
    states: recurrent states of the slots.
    caching: whether anything is shared and remembered.
    secret: see `PrefixHasher`.
    capacity: tokens of the longest sequence that fits into the empty cache.
    """

    def __init__(
        self,
        layout: CacheLayout,
        block_size: int,
        max_num_seqs: int,
        max_len: int,
        step_tokens: int,
        caching: bool = True,
        secret: str | None = None,
        snapshot_interval: int = 0,
    ) -> None:
        self.block_size, self._max_len, self._step_tokens = block_size, max_len, step_tokens
        self.boundary = max((g.block_size for g in layout.groups), default=block_size)
        if any(g.block_size % block_size or self.boundary % g.block_size for g in layout.groups):
            sizes = [g.block_size for g in layout.groups]
            raise ConfigError(f"block_size is {block_size}: cache groups of {sizes} are no multiples; compile again")
        self.pool = BlockPool(max(layout.num_blocks, 1), caching)
        self.groups: list[FullBlocks | WindowBlocks] = [
            (WindowBlocks if group.retention == "window" else FullBlocks)(i, group, self.pool, max_num_seqs, max_len)
            for i, group in enumerate(layout.groups)
        ]
        self._windows = [g for g in self.groups if isinstance(g, WindowBlocks)]
        self._single = self.groups[0] if len(self.groups) == 1 and not self._windows else None
        self.tables = tuple(g.table for g in self.groups)
        self._lookahead, self._ahead = layout.lookahead, int(layout.next_seen)
        self.hasher = PrefixHasher(block_size, secret, layout.groups, self._ahead)
        self.states = SlotStates()
        if layout.recurrent:
            self.states = RecurrentStates(layout, self.boundary, snapshot_interval, caching, self.hasher, max_num_seqs)
        self.retentions: list[Retained] = [*self.groups, *self.states.pools]
        self.caching = caching and bool(self.retentions) and self.states.cacheable
        # All by slot. reach: tokens that have blocks, -1 where the slot must first get a block of its own. _release_at:
        # position after which a window frees a block. stored: tokens in findable blocks. _store_at: tokens at which
        # the next blocks become findable.
        self.reach = np.full(max_num_seqs, NEVER, dtype=np.int32)
        self._release_at = np.full(max_num_seqs, NEVER, dtype=np.int32)
        self.stored, self._store_at = (np.zeros(max_num_seqs, dtype=np.int32) for _ in range(2))
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.capacity = self._longest()

    def _longest(self) -> int:
        size, blocks = self.block_size, len(self.pool.references) - 1
        longest = -(-self._max_len // size)
        while longest and sum(self._most_blocks(longest * size)) > blocks:
            longest -= 1
        return min(longest * size, self._max_len)

    def _most_blocks(self, num_tokens: int) -> list[int]:
        return [g.most_blocks(num_tokens, self._step_tokens) for g in self.groups]

    # Beginnings that need not be computed

    def reads(self, state: RequestState) -> bool:
        """Whether a request uses what others have computed."""
        return self.caching and not (state.scoring or state.request.params.skip_reading_prefix_cache)

    def lookup(self, state: RequestState) -> Hit:
        """The longest beginning of a sequence in the cache, at least one token short."""
        none = Hit(0, [[] for _ in self.groups])
        if not self.reads(state):
            return none
        end = (state.num_tokens - 1) // self.boundary * self.boundary
        self.hasher.digest(state, state.num_tokens - self._ahead)  # all at once: a step will store the rest
        return self.states.compared(self.find(state.digests, end) or none, self.groups, state, end)

    def find(self, digests: list[bytes], end: int) -> Hit | None:
        """The longest prefix that is cached, of at most ``end`` tokens. digests: of its blocks."""
        end, found = cached(self.retentions, digests, end, self.block_size, self.boundary)
        if not end:
            return None
        blocks = []
        for group, entries in zip(self.groups, found, strict=False):
            first = min(group.first_seen(end), end // group.unit)
            blocks.append([0] * first + entries[first : end // group.unit])
        return Hit(end, blocks, self.states.found(found[-1], end))

    def can_fork(self, leader: int, num_tokens: int) -> bool:
        """Whether the slot still holds the blocks that the last of ``num_tokens`` tokens sees."""
        forkable = bool(self.groups) and self.states.forkable
        return forkable and all(g.freed[leader] <= g.first_seen(num_tokens - 1) for g in self._windows)

    def fork(self, leader: int, num_tokens: int) -> Hit:
        """All but the last of the tokens that a slot has computed, sharing the block that this one lies in."""
        blocks = [g.table[leader, : -(-num_tokens // g.unit)].tolist() for g in self.groups]
        return Hit(num_tokens - 1, blocks, shared=True)

    def fits(self, num_tokens: int, hit: Hit) -> bool:
        """Whether there are blocks for a sequence of ``num_tokens`` tokens that begins with a hit."""
        need = len(self.groups) if hit.shared else 0
        for most, blocks in zip(self._most_blocks(num_tokens + 1), hit.blocks, strict=True):
            held = [b for b in blocks if b]
            need += max(0, most - len(held)) + sum(1 for b in held if self.pool.references[b] == 0)
        return need <= self.pool.free_blocks

    def enter(self, slot: int, hit: Hit, num_prompt_tokens: int) -> None:
        """Hold for a slot what a hit gives it; its snapshot until that is released."""
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            group.enter(slot, blocks)
        self.states.enter(slot, hit.snapshot, hit.branch)
        self.stored[slot] = hit.num_tokens // self.block_size * self.block_size
        self._num_prompt_tokens[slot] = num_prompt_tokens
        self._set_store_at(slot)
        self._note(slot)
        if hit.shared:
            self.reach[slot] = _SHARED

    def _note(self, slot: int) -> None:
        self.reach[slot] = min((g.reach(slot) for g in self.groups), default=NEVER)
        if self._windows:
            self._release_at[slot] = min(g.release_at(slot) for g in self._windows)

    # Room for what a step writes

    def unready(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """For all slots [bool]: whether something is to be done before the tokens from ``starts`` to ``ends`` are
        computed."""
        unready = ends > self.reach
        return unready | (starts > self._release_at) if self._windows else unready

    def extend_each(self, slots: np.ndarray, ends: np.ndarray) -> bool:
        """The usual case at once: one group that keeps all, one block more for each slot, and there are enough. False,
        and nothing done, if not."""
        group, reach = self._single, self.reach[slots]
        if group is None or len(slots) > self.pool.free_blocks:
            return False
        if (reach != (ends - 1) // group.unit * group.unit).any():
            return False
        group.table[slots, reach // group.unit] = self.pool.allocate_all(len(slots))
        group.held[slots] += 1
        self.reach[slots] += group.unit
        return True

    def extend_all(self, slots: np.ndarray, ends: np.ndarray) -> bool:
        """Allocate blocks for all of these slots; no slot may share the block that it writes. False, and nothing done,
        when there are not enough."""
        pairs = list(zip(slots.tolist(), ends.tolist(), strict=True))
        if sum(g.missing(slot, end) for slot, end in pairs for g in self.groups) > self.pool.free_blocks:
            return False
        for slot, end in pairs:
            for group in self.groups:
                group.extend(slot, end)
            self._note(slot)
        return True

    def look_ahead(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """Allocate blocks for the draft graph, which writes after the last tokens of these slots. Blocks of the step
        are allocated before. With too few blocks drafts see less and are worse."""
        ends = np.minimum(ends + self._lookahead, self._max_len)
        late = ends > self.reach[slots]
        if np.count_nonzero(late) and not self.extend_each(slots[late], ends[late]):
            self.extend_all(slots[late], ends[late])

    def extend(self, slot: int, start: int, end: int, copies: list[tuple[int, int]]) -> bool:
        """Give back what the token at ``start`` and later ones do not see, and allocate up to ``end``; append the
        copies (from, to) to make first. False when blocks are missing."""
        for window in self._windows:
            window.release_before(slot, start)
        shared = self.reach[slot] == _SHARED
        need = sum(g.missing(slot, end) for g in self.groups) + (len(self.groups) if shared else 0)
        if need > self.pool.free_blocks:
            return False
        for group in self.groups:
            group.extend(slot, end)
            if shared and (copy := group.own(slot, start)):
                copies.append(copy)
        self._note(slot)
        return True

    def free(self, slot: int) -> None:
        """Let go of everything a slot holds."""
        for group in self.groups:
            group.free(slot)
        self.states.leave(slot)
        self.reach[slot] = self._release_at[slot] = NEVER
        self.stored[slot] = self._store_at[slot] = 0

    # What later requests may find

    def due(self, slots: np.ndarray, num_computed_tokens: np.ndarray) -> np.ndarray:
        """Which slots [bool] have blocks to store: a prompt's at once, an output's several at a time, which costs
        less."""
        return num_computed_tokens >= self._store_at[slots]

    def store(self, state: RequestState, num_computed_tokens: int) -> None:
        """Make the full blocks of the known tokens findable. The step in flight may still write them: a request that
        finds them reads them later."""
        if not self.caching:
            return
        slot, size = state.slot, self.block_size
        known = min(num_computed_tokens, state.num_tokens - self._ahead)
        stored, end = int(self.stored[slot]), known // size * size
        if end > stored:
            self.hasher.digest(state, end)
            for group in self.groups:
                each = group.unit // size
                group.store(slot, stored, end, state.digests[each - 1 :: each])
            self.stored[slot] = end
        self._set_store_at(slot)

    def _set_store_at(self, slot: int) -> None:
        size, stored = self.block_size, int(self.stored[slot])
        more = 1 if stored + size <= self._num_prompt_tokens[slot] else _STORED_AT_ONCE
        self._store_at[slot] = stored + more * size

    def reset(self) -> bool:
        """Forget all contents; False, and nothing done, while sequences hold some."""
        if not self.states.idle:
            return False
        return self.pool.reset_cache() and all(snapshots.pool.reset_cache() for snapshots in self.states.pools)
