"""The cache's memory on a CPU, which the operating system gives at its first use: asked for before kernels use it.

Where memory comes in pages of 2 MB, kernel threads that write to a fresh one at the same time each clear one, and only
one is kept. On a virtual machine that has not got its memory from the host yet, each page takes 5 ms. A thread asks for
the first pages while the process starts, and for more when half of the last request is reached; a step that comes first
asks itself. Memory that no sequence has reached takes no pages. No torch in here, which takes a second to import.
"""

from __future__ import annotations

import ctypes
import threading

from graphllm.config import ConfigError
from graphllm.host.hugepages import HUGE, zeros

_POPULATE_WRITE = 23  # of madvise: map the pages, writable, as if written to; since Linux 5.14
_SMALL = 4096
_FIRST = 32 << 20  # bytes in all, for the first prompts: up to a whole page of each tensor


class CacheMemory:
    """Zeros for equal cache tensors.

    tensors: of each, [blocks, block_bytes] uint8.
    first: bytes that a thread asks for at once, and then whole pages before they are reached; 0 where only `reach`
    asks.

    Raises ConfigError when there is no room.
    """

    def __init__(self, tensors: int, blocks: int, block_bytes: int, first: int = _FIRST) -> None:
        try:
            self.tensors = [zeros(blocks * block_bytes).reshape(blocks, block_bytes) for _ in range(tensors)]
        except MemoryError as failure:
            raise ConfigError(
                f"kv cache: {blocks} blocks do not fit in memory ({failure}); lower --kv-cache-memory-bytes"
            ) from failure
        self.blocks, self._block_bytes = blocks, block_bytes
        self._places = [t.ctypes.data for t in self.tensors]
        self._stretch = -(-HUGE // block_bytes)  # blocks asked for at once: a page of each tensor
        self._asked, self._ahead, self._begun = 0, first > 0, 0
        self._asking, self._held = threading.Lock(), False
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if first:
            self._begin(max(1, first // (block_bytes * max(1, tensors))) - 1)

    def reach(self, block: int) -> None:
        """Have the memory of all blocks up to this one. A system that does not know how gives it at first use."""
        while self._asked <= min(block, self.blocks - 1) and not self._held:
            self._ask(block)
        if self._ahead and self._asked - block <= self._stretch // 2:
            self._begin(self._asked)

    def hold(self, held: bool) -> None:
        """Whether no memory is asked for: all of it was given back, and none has been reached."""
        with self._asking:
            self._held, self._asked, self._begun = held, 0, 0

    def _begin(self, block: int) -> None:
        """Ask for what lies up to that block in a thread, once."""
        block = min(block, self.blocks - 1)
        if self._begun <= block:
            self._begun = block + 1
            name = "graphllm-cache-memory"
            threading.Thread(target=self._ask, args=(block,), name=name, daemon=True).start()

    def _ask(self, block: int) -> None:
        with self._asking:
            until = min(self.blocks, -(-(block + 1) // self._stretch) * self._stretch)
            if self._held or until <= self._asked:
                return
            for place in self._places:
                first = (place + self._asked * self._block_bytes) // _SMALL * _SMALL
                self._madvise(first, place + until * self._block_bytes - first, _POPULATE_WRITE)
            self._asked = until
