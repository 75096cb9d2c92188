"""HostMemory: a rank's copies of blocks and snapshots in the host's memory; an entry is one piece, whatever tensors a
block is divided into on the device."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphllm.config import ConfigError
from graphllm.host.hugepages import zeros
from graphllm.host.shared_memory import shared_zeros


class HostMemory:
    """Memory that the system gives when it is first written.

    entries: of each kind, "blocks" and "snapshots".
    shapes: of an entry of each kind, (pieces, bytes of a piece); the device has a tensor for each piece.
    shared: other processes may map it, by `files`.

    Raises ConfigError when there is no room.
    """

    def __init__(self, entries: Mapping[str, int], shapes: Mapping[str, tuple[int, int]], shared: bool = False) -> None:
        self.files: dict[str, int] = {}  # descriptors, by kind
        self._memory = {kind: self._allocate(kind, count, shapes[kind], shared) for kind, count in entries.items()}

    def _allocate(self, kind: str, count: int, shape: tuple[int, int], shared: bool) -> np.ndarray:
        nbytes = count * math.prod(shape)
        try:
            if shared:
                self.files[kind], memory = shared_zeros(nbytes)
            else:
                memory = zeros(max(1, nbytes))[:nbytes]
            return memory.reshape(count, *shape)
        except MemoryError as failure:
            raise ConfigError(
                f"kv_offloading_size: {nbytes} bytes do not fit in the host's memory ({failure}); lower it"
            ) from failure

    @property
    def kinds(self) -> list[str]:
        return list(self._memory)

    def pieces(self, kind: str) -> np.ndarray:
        """[entries, pieces, bytes] uint8."""
        return self._memory[kind]

    def close(self) -> None:
        """Let no further process map it."""
        while self.files:
            os.close(self.files.popitem()[1])

    def entry_bytes(self, kind: str) -> int:
        """The size of an entry."""
        _, pieces, size = self._memory[kind].shape
        return int(pieces * size)

    def entry(self, kind: str, number: int) -> np.ndarray:
        """The bytes of one entry, where they lie."""
        return self._memory[kind][number].reshape(-1)


def shapes_of(tensors: Mapping[str, Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """Of an entry of each kind, from the device's tensors [entries, bytes]."""
    return {kind: (len(of), int(of[0].shape[1]) if of else 0) for kind, of in tensors.items()}


def columns(pairs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The first numbers of pairs, and the second ones."""
    found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
