"""The states of a loaded artifact: memory for each, and what the host does with it between steps.

Block states are views of a pool of equal blocks, recurrent ones of a memory with all of a slot's side by side. Slots,
snapshots and blocks are numbers here: who uses which one, the cache manager knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from graphllm.config import ConfigError
from graphllm.program.program import Program
from graphllm.program.stages import own_states, own_tensors
from graphllm.program.states import StatePlace
from graphllm.runtime.memory.cpu_cache_memory import CacheMemory
from graphllm.runtime.memory.memory import Array, Memory


class States:
    """Memory for the states of a program.

    num_blocks: of the pool; no request writes block 0.
    num_snapshots: copies of recurrent states.
    cache: the pool's memory on a CPU; None: it is made here.
    reads: the states that this stage of a pipeline reads; None: all.

    Raises ConfigError when the memory cannot be allocated.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        num_blocks: int,
        num_snapshots: int = 0,
        cache: CacheMemory | None = None,
        reads: frozenset[str] | None = None,
    ) -> None:
        self._memory, self.num_blocks, self.num_snapshots = memory, num_blocks, num_snapshots
        self._cache = cache
        places = program.states if reads is None else own_states(program, reads)
        used = range(program.blocks.tensors) if reads is None else sorted(own_tensors(places))
        self._pool = self._allocate(len(used), program.blocks.bytes)
        self._numbers = {tensor: at for at, tensor in enumerate(used)}  # places in the pool, by numbers in all stages
        self._entries = program.entries
        self._slots, self._snapshots = self._recurrent_memory(program)
        self.tensors = {name: self._placed(p) for name, p in places.items()}
        self.adapters = {n.removeprefix("state."): p.shape for n, p in places.items() if p.axis == "adapter"}
        self._version = self.tensors.get("state.version")  # of recurrent states, by slot: which one is valid

    def named(self, names: Iterable[str]) -> dict[str, Array]:
        """The named states that exist, by name."""
        return {n: self.tensors[f"state.{n}"] for n in names if f"state.{n}" in self.tensors}

    def entries(self, kind: str) -> list[Array]:
        """The memory of all "blocks", tensor by tensor, or of all "snapshots", each [entries, bytes] uint8."""
        if kind == "blocks":
            return self._pool
        return [] if self._snapshots is None else [self._snapshots]

    @property
    def block_bytes(self) -> int:
        """Of one block in all tensors."""
        return sum(t[0].nbytes for t in self._pool)

    @property
    def snapshot_bytes(self) -> int:
        """Of one snapshot."""
        return 0 if self._snapshots is None else int(self._snapshots.shape[1])

    @property
    def memories(self) -> list[Array]:
        """What blocks, recurrent states and snapshots lie in."""
        return [*self._pool, *(memory for memory in (self._slots, self._snapshots) if memory is not None)]

    def hold(self, held: bool) -> None:
        """Whether no memory is asked for, on a CPU: all of it was given back."""
        if self._cache is not None:
            self._cache.hold(held)

    def _recurrent_memory(self, program: Program) -> tuple[Array | None, Array | None]:
        """Of slots [slots, versions, bytes] and of snapshots [snapshots, bytes]; None without recurrent states."""
        last = (p for p in program.states.values() if p.retention == "last" and p.axis == "slot")
        versions = next((p.shape[0] for p in last), 0)
        if not versions:
            return None, None
        if not program.slot_bytes:
            raise ConfigError(
                "the artifact is of a version with recurrent states in memory of their own; compile again"
            )
        slots = self._memory.zeros((program.entries["recurrent"], versions, program.slot_bytes), "uint8")
        return slots, self._memory.zeros((self.num_snapshots, program.snapshot_bytes), "uint8")

    def _placed(self, place: StatePlace) -> Array:
        if place.axis == "block":
            return self._view(self._pool[self._numbers[place.tensor]], place, self.num_blocks)
        if place.axis == "snapshot":
            return self._view(self._snapshots, place, self.num_snapshots)
        if place.retention == "last":
            assert self._slots is not None
            return self._view(self._slots, place, self._entries[place.counted])
        return self._memory.zeros((self._entries[place.counted], *place.shape), place.dtype)

    def _view(self, memory: Array, place: StatePlace, entries: int) -> Array:
        typed = self._memory.typed(self._memory.shaped(memory, "uint8", (memory.nbytes,)), place.dtype)
        return self._memory.strided(typed, (entries, *place.shape), place.stride, place.offset)

    def _allocate(self, tensors: int, block_bytes: int) -> list[Array]:
        # Zeroed: a block's unused tail is multiplied by a weight of zero, which must not meet NaN.
        if not tensors:
            return []
        if self._memory.device.type == "cpu":
            self._cache = self._cache or CacheMemory(tensors, self.num_blocks, block_bytes)
            return [self._memory.wrapped(t) for t in self._cache.tensors]
        try:
            return [self._memory.zeros((self.num_blocks, block_bytes), "uint8") for _ in range(tensors)]
        except RuntimeError as failure:
            raise ConfigError(
                f"kv cache: {self.num_blocks} blocks do not fit in memory ({failure}); lower --kv-cache-memory-bytes "
                "or --gpu-memory-utilization"
            ) from failure

    def release(self) -> None:
        """Forget the memory."""
        self._cache, self._version = None, None
        self._pool, self.tensors, self._slots, self._snapshots = [], {}, None, None

    def reach(self, block: int) -> None:
        """Have the memory of all blocks up to this one, on a CPU."""
        if self._cache is not None:
            self._cache.reach(block)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every tensor of the pool."""
        for tensor in self._pool:
            for source, target in pairs:
                tensor[target].copy_(tensor[source])

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Zero the recurrent states of slots."""
        for slot in slots:
            if self._slots is not None:
                self._slots[slot].zero_()
        self.use_first_version(slots)

    def use_first_version(self, slots: Sequence[int]) -> None:
        """Let the first version of the recurrent states of slots be the valid one."""
        for slot in slots:
            if self._version is not None:
                self._version[slot].zero_()

    def save_snapshots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent states (slot, snapshot), at the version that is valid; of an entry for exports, the first."""
        assert self._slots is not None
        assert self._snapshots is not None
        for slot, snapshot in pairs:
            entry, version = self._slots[slot], self._version
            if version is None or slot >= len(version):
                valid = entry[0]
            else:
                valid = entry.index_select(0, version[slot].view(1).long())[0]
            self._snapshots[snapshot].copy_(valid)

    def load_snapshots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy snapshots (snapshot, slot) into slots, as their first version."""
        assert self._slots is not None
        assert self._snapshots is not None
        self.reset_slots([slot for _, slot in pairs])
        for snapshot, slot in pairs:
            self._slots[slot, 0].copy_(self._snapshots[snapshot])

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """The bytes of blocks, all tensors one after another."""
        return [b"".join(t[block].cpu().numpy().tobytes() for t in self._pool) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Put back what `read_blocks` gave, maybe in another process."""
        self.reach(max(blocks, default=0))
        for block, content in zip(blocks, contents, strict=True):
            self._scatter(content, [t[block] for t in self._pool])

    def read_snapshots(self, snapshots: Sequence[int]) -> list[bytes]:
        """The bytes of snapshots."""
        assert self._snapshots is not None
        return [self._snapshots[i].cpu().numpy().tobytes() for i in snapshots]

    def write_snapshots(self, snapshots: Sequence[int], contents: Sequence[bytes]) -> None:
        """Put back what `read_snapshots` gave."""
        assert self._snapshots is not None
        for i, content in zip(snapshots, contents, strict=True):
            self._scatter(content, [self._snapshots[i]])

    def _scatter(self, content: bytes, into: Sequence[Array]) -> None:
        whole, at = self._memory.wrapped(np.frombuffer(bytearray(content), dtype=np.uint8)), 0
        for array in into:
            array.copy_(whole[at : at + array.numel()])
            at += array.numel()
