"""What a cache group or a recurrent state keeps of a sequence: one manager for each kind of retention.

`FullBlocks` keeps everything, `WindowBlocks` the last tokens, `Snapshots` copies of the whole state at some positions.
For prefix reuse they have one interface: ``unit`` tokens make an entry, ``find`` looks entries up by digest, ``usable``
says how long a beginning they serve. The first two also hold the block tables of their group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphllm.engine.cache.block_pool import BlockPool
from graphllm.program.schema import CacheGroup

NEVER = 2**31 - 1  # a position that no sequence reaches


class FullBlocks:
    """Blocks of a group that keeps all tokens.

    number: of the group.
    table [slots, blocks] int32: each slot's blocks, 0 where it has none.
    held [slots]: how long its list is.
    """

    def __init__(self, number: int, group: CacheGroup, pool: BlockPool, max_num_seqs: int, max_len: int) -> None:
        self.number, self.unit, self._pool = number, group.block_size, pool
        self.table = np.zeros((max_num_seqs, -(-max_len // group.block_size)), dtype=np.int32)
        self.held = np.zeros(max_num_seqs, dtype=np.int32)

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` holds at most. step_tokens: tokens of a step."""
        return -(-num_tokens // self.unit)

    def first_seen(self, position: int) -> int:
        """The first block that the token at a position sees."""
        return 0

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Cached blocks by their digests, 0 for a missing block; the list ends where nothing later can be used."""
        found = []
        for digest in digests:
            found.append(self._pool.find(self.number, digest))
            if not found[-1]:
                break
        return found

    def usable(self, found: Sequence[int], num_tokens: int) -> int:
        """The longest prefix of up to ``num_tokens`` tokens, in tokens, such that its last token sees no missing
        block."""
        blocks = num_tokens // self.unit
        return next((i for i, b in enumerate(found[:blocks]) if not b), min(blocks, len(found))) * self.unit

    def enter(self, slot: int, blocks: Sequence[int]) -> None:
        """Hold blocks for a new owner of a slot; they are the beginning of its list."""
        for block in blocks:
            if block:
                self._pool.hold(block)
        self.table[slot, : len(blocks)] = blocks
        self.held[slot] = len(blocks)

    def missing(self, slot: int, end: int) -> int:
        """Blocks to allocate before the slot can hold ``end`` tokens."""
        return max(0, -(-end // self.unit) - int(self.held[slot]))

    def extend(self, slot: int, end: int) -> None:
        """Allocate them. Raises KeyError, and allocates none, when there are not enough."""
        held, more = int(self.held[slot]), self.missing(slot, end)
        if more:
            self.table[slot, held : held + more] = self._pool.allocate_all(more)
            self.held[slot] = held + more

    def reach(self, slot: int) -> int:
        """How many tokens the slot's blocks have room for."""
        return int(self.held[slot]) * self.unit

    def own(self, slot: int, position: int) -> tuple[int, int] | None:
        """Give the slot a block of its own at a position that it is about to write, where others hold or may find the
        one there: (old, new), the copy yet to be made; None if it has one."""
        at = position // self.unit
        block = int(self.table[slot, at])
        if not block or self._pool.exclusive(block):
            return None
        made = self._pool.allocate()
        self._pool.release([block])
        self.table[slot, at] = made
        return block, made

    def store(self, slot: int, stored: int, num_tokens: int, digests: Sequence[bytes]) -> None:
        """Make full blocks findable, by the digests of their ends. stored: tokens for which that was done."""
        first, end = stored // self.unit, num_tokens // self.unit
        for i, block in enumerate(self.table[slot, first:end].tolist(), first):
            if block:
                self._pool.store(block, self.number, digests[i])

    def free(self, slot: int) -> None:
        """Let go of all blocks of a slot, the last first."""
        held = int(self.held[slot])
        self._pool.release([b for b in reversed(self.table[slot, :held].tolist()) if b])
        self.table[slot, :held] = 0
        self.held[slot] = 0


class WindowBlocks(FullBlocks):
    """Blocks of a sliding-window group: a token sees the last ``window`` tokens, itself included.

    freed [slots]: blocks at the beginning of the list that were given back or never held.
    """

    def __init__(self, number: int, group: CacheGroup, pool: BlockPool, max_num_seqs: int, max_len: int) -> None:
        super().__init__(number, group, pool, max_num_seqs, max_len)
        self.window = group.window
        self.freed = np.zeros(max_num_seqs, dtype=np.int32)

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        return min(-(-num_tokens // self.unit), -(-(self.window + step_tokens) // self.unit) + 1)

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.unit

    def find(self, digests: Sequence[bytes]) -> list[int]:
        return [self._pool.find(self.number, digest) for digest in digests]

    def usable(self, found: Sequence[int], num_tokens: int) -> int:
        size = num_tokens // self.unit
        while size:
            first = self.first_seen(size * self.unit)
            hole = next((i for i in range(size - 1, first - 1, -1) if not found[i]), None)
            if hole is None:
                break
            size = hole
        return size * self.unit

    def enter(self, slot: int, blocks: Sequence[int]) -> None:
        super().enter(slot, blocks)
        self.freed[slot] = next((i for i, b in enumerate(blocks) if b), len(blocks))

    def release_at(self, slot: int) -> int:
        """When the next token to compute is after this position, its window has left a block."""
        return (int(self.freed[slot]) + 1) * self.unit + self.window - 2

    def release_before(self, slot: int, position: int) -> None:
        """Free blocks that neither the token at a position nor a later one sees."""
        freed, first = int(self.freed[slot]), self.first_seen(position)
        if first > freed:
            gone = self.table[slot, freed:first]
            self._pool.release([b for b in reversed(gone.tolist()) if b])
            gone[:] = 0
            self.freed[slot] = first

    def free(self, slot: int) -> None:
        super().free(slot)
        self.freed[slot] = 0


@dataclass
class Mark:
    """A snapshot as a sequence left it.

    writes: how often it had been given out to be written.
    loads: sequences that had gone on from it.
    digest: what it can be found by; empty until it is written.
    """

    snapshot: int
    writes: int
    loads: int
    digest: bytes = b""


class Snapshots:
    """Copies of recurrent states, numbered from 0, at positions that are multiples of ``unit`` tokens.

    rescued: a tier keeps what is evicted here, so each sequence may have room at the cost of others.
    """

    def __init__(self, num_snapshots: int, unit: int, caching: bool) -> None:
        self.unit, self.rescued = unit, False
        self.pool = BlockPool(num_snapshots + 1, caching)  # its block 0 is none of them
        self._writes = [0] * num_snapshots
        self._loads, self._digests = [0] * num_snapshots, [b""] * num_snapshots  # of what each holds now
        self._marked = dict[int, Mark]()  # by snapshot: of the sequence that writes it
        self._superseded, self._spare = OrderedDict[int, Mark](), OrderedDict[int, Mark]()  # by snapshot

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """For each digest its snapshot's number + 1, 0 for none."""
        return [self.pool.find(0, digest) for digest in digests]

    def usable(self, found: Sequence[int], num_tokens: int) -> int:
        """The longest prefix of up to ``num_tokens`` tokens, in tokens, that ends at a snapshot."""
        return next((i for i in range(num_tokens // self.unit, 0, -1) if found[i - 1]), 0) * self.unit

    def known(self, digest: bytes) -> bool:
        """Whether there is one with that content."""
        return self.pool.find(0, digest) > 0

    def reserve(self, evict: bool) -> int:
        """A snapshot to write, held; -1 for none. Empty ones go first, then superseded ones. evict: then the spare ones
        of running sequences, then the least recently used."""
        if not self.pool.free_blocks:
            return -1
        if self.pool.has_empty:
            return self._given_out(self.pool.allocate() - 1)
        for marks in (self._superseded, self._spare) if evict else (self._superseded,):
            for mark in list(marks.values()):
                if self._take(mark):
                    return mark.snapshot
                if not self.unchanged(mark):
                    del marks[mark.snapshot]
        return self._given_out(self.pool.allocate() - 1) if evict else -1

    def adopt(self, digest: bytes) -> int:
        """The least recently used one, held, to be found by that digest: the caller writes it. There is a free one."""
        snapshot = self._given_out(self.pool.allocate() - 1)
        self.store(snapshot, digest, shared=False)
        return snapshot

    def rewrite(self, mark: Mark) -> bool:
        """Reserve this one for later contents of its sequence; False when it has changed or somebody holds it."""
        if self.is_held(mark):
            return False
        self.supersede(mark)
        return self._take(mark)

    def _take(self, mark: Mark) -> bool:
        """Reserve this one; False, and nothing done, when it has changed or somebody holds it."""
        if not self.unchanged(mark) or self.is_held(mark):
            return False
        self.pool.take(mark.snapshot + 1)
        self._given_out(mark.snapshot)
        return True

    def _given_out(self, snapshot: int) -> int:
        self._writes[snapshot] += 1
        self._loads[snapshot] = 0
        self._wanted(snapshot)
        return snapshot

    def _wanted(self, snapshot: int) -> None:
        self._superseded.pop(snapshot, None)
        self._spare.pop(snapshot, None)

    def mark(self, snapshot: int) -> Mark:
        """A snapshot that a sequence has reserved, and nobody has gone on from."""
        self._marked[snapshot] = mark = Mark(snapshot, self._writes[snapshot], 0)
        return mark

    def load(self, snapshot: int) -> Mark:
        """A sequence goes on from a snapshot."""
        self._loads[snapshot] += 1
        self._wanted(snapshot)
        return Mark(snapshot, self._writes[snapshot], 1, self._digests[snapshot])

    def unload(self, mark: Mark) -> None:
        """The sequence that left a snapshot has come to nothing."""
        if self._writes[mark.snapshot] == mark.writes:
            self._loads[mark.snapshot] -= mark.loads

    def is_held(self, mark: Mark) -> bool:
        """Whether somebody holds a snapshot."""
        return self.pool.references[mark.snapshot + 1] > 0

    def unchanged(self, mark: Mark) -> bool:
        """Whether a snapshot holds what it did, and nobody else has gone on from it."""
        return self._writes[mark.snapshot] == mark.writes and self._loads[mark.snapshot] <= mark.loads

    def supersede(self, mark: Mark) -> None:
        """The sequence that left a snapshot has a better one. Unless others went on from it, none is likely to."""
        if self.unchanged(mark):
            self._superseded[mark.snapshot] = mark
        elif self._writes[mark.snapshot] != mark.writes:
            for observer in self.pool.observers:
                observer.outdated((0, mark.digest))

    def is_superseded(self, snapshot: int) -> bool:
        """Whether the next sequence that needs room has it first, and nobody else is likely to want it."""
        return snapshot in self._superseded

    def spare(self, mark: Mark) -> None:
        """The sequence that left a snapshot still runs, and has another one if need be."""
        self._spare[mark.snapshot] = mark

    def keep(self, mark: Mark) -> bool:
        """The sequence needs a snapshot after all, and has just used it; False when it holds something else by now."""
        if self._writes[mark.snapshot] != mark.writes:
            return False
        self._wanted(mark.snapshot)
        self.hold(mark.snapshot)
        self.release(mark.snapshot)
        return True

    def hold(self, snapshot: int) -> None:
        """Keep a snapshot until it is released."""
        self.pool.hold(snapshot + 1)

    def store(self, snapshot: int, digest: bytes, shared: bool) -> None:
        """Make a written snapshot findable. shared: several prompts are known to begin like that."""
        self.pool.store(snapshot + 1, 0, digest)
        if (mark := self._marked.pop(snapshot, None)) is not None and mark.writes == self._writes[snapshot]:
            mark.digest = digest
        self._loads[snapshot], self._digests[snapshot] = 2 if shared else 0, digest

    def release(self, snapshot: int) -> None:
        """Let go of a snapshot; one that cannot be found is reused first."""
        self.pool.release([snapshot + 1])
