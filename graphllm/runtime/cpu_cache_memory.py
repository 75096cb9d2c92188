"""The cache's memory on a CPU, which the operating system gives at its first use: asked for before kernels use it.

Where memory comes in pages of 2 MB, kernel threads that write to a fresh one at the same time each clear one, and only
one is kept; on a virtual machine whose memory the host has not given yet, each takes 5 ms. The first of it is asked for
while the process starts, the rest before the step that reaches it. No torch in here, which takes a second to import.
"""

from __future__ import annotations

import ctypes
import threading

from graphllm.config import ConfigError
from graphllm.hugepages import zeros

_POPULATE_WRITE = 23  # of madvise: map the pages, writable, as if written to; since Linux 5.14
_HUGE, _SMALL = 2 << 20, 4096
_FIRST = 128 << 20  # bytes, for the first prompts


class CacheMemory:
    """Zeros for equal cache tensors. tensors: of each, [blocks, block_bytes] uint8. A thread asks for the ``first``
    bytes at once. Raises ConfigError when there is no room."""

    def __init__(self, tensors: int, blocks: int, block_bytes: int, first: int = _FIRST) -> None:
        try:
            self.tensors = [zeros(blocks * block_bytes).reshape(blocks, block_bytes) for _ in range(tensors)]
        except MemoryError as failure:
            raise ConfigError(
                f"kv cache: {blocks} blocks do not fit in memory ({failure}); lower --kv-cache-memory-bytes"
            ) from failure
        self.blocks, self._block_bytes = blocks, block_bytes
        self._places = [t.ctypes.data for t in self.tensors]
        self._asked = 0
        self._asking = threading.Lock()
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        until = min(blocks, first // (block_bytes * max(1, tensors)))
        threading.Thread(target=self._begin, args=(until,), name="graphllm-cache-memory", daemon=True).start()

    def _begin(self, until: int) -> None:
        while self._asked < until:
            self.reach(self._asked)

    def reach(self, block: int) -> None:
        """Have the memory of all blocks up to this one. A system that does not know how gives it at first use."""
        if block < self._asked:
            return
        with self._asking:
            if block < self._asked:
                return
            until = min(self.blocks, block + -(-_HUGE // self._block_bytes))
            for place in self._places:
                first = (place + self._asked * self._block_bytes) // _SMALL * _SMALL
                self._madvise(first, place + until * self._block_bytes - first, _POPULATE_WRITE)
            self._asked = until
