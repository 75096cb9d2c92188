"""RegisteredMemory: host memory that a GPU copies from and to by itself. A thread registers it in parts, so that an
engine starts at once: the system gives and pins some gigabytes of it a second."""

from __future__ import annotations

import logging
import threading

from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.runtime.tiers.host_memory import HostMemory

PART = 1 << 30  # bytes that are registered at once, about
_PAGE = 4096
_log = logging.getLogger(__name__)


class RegisteredMemory:
    """memory: whose entries are registered, the first ones first. The calling thread has the GPU's context, as the
    driver's first device has it."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory, self._driver = memory, CudaDriver()
        self._ready = dict.fromkeys(memory.kinds, 0)
        self._places: list[int] = []
        self._closing = threading.Event()
        self._context = self._driver.current()
        self._thread = threading.Thread(target=self._register_all, name="graphllm-host-memory", daemon=True)
        self._thread.start()

    def ready(self) -> dict[str, int]:
        """By kind, the entries that are registered so far."""
        return dict(self._ready)

    def _register_all(self) -> None:
        try:
            self._driver.use(self._context)
            for kind in self._memory.kinds:
                self._register(kind)
        except CudaError as failure:
            _log.warning("the cache has less host memory than kv_offloading_size: %s", failure)

    def _register(self, kind: str) -> None:
        pieces = self._memory.pieces(kind)
        each = pieces[0].nbytes
        # Parts begin at pages of their own.
        step = max(1, PART // each) if each % _PAGE == 0 else len(pieces)
        for first in range(0, len(pieces), step):
            if self._closing.is_set():
                return
            part = pieces[first : first + step]
            self._driver.register(part.ctypes.data, part.nbytes)
            self._places.append(part.ctypes.data)
            self._ready[kind] = first + len(part)

    def close(self) -> None:
        """Give it back. No copy runs."""
        self._closing.set()
        self._thread.join()
        for place in self._places:
            self._driver.unregister(place)
        self._places.clear()
