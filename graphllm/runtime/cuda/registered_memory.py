"""RegisteredMemory: host memory that a GPU copies from and to by itself. It is registered in parts, as it is wanted, by
a thread, so that an engine starts at once, and takes no memory that it does not need."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.runtime.cuda.registration import Registration

PART = 1 << 27  # bytes that are registered at once, about: meanwhile the driver launches no step
_PAGE = 4096
_log = logging.getLogger(__name__)


class RegisteredMemory:
    """memory: by kind, entries [n, ...], which are registered the first ones first. The calling thread has the GPU's
    context."""

    def __init__(self, memory: Mapping[str, np.ndarray], driver: CudaDriver) -> None:
        self._memory, self._driver, self._registration = memory, driver, Registration(driver)
        self._ready = dict.fromkeys(memory, 0)
        self._places: list[int] = []
        self._closing = threading.Event()  # nothing more is registered
        begin = functools.partial(driver.use, driver.current())
        self._thread = ThreadPoolExecutor(1, "graphllm-host-memory", initializer=begin)

    def prepare(self, entries: Mapping[str, int]) -> Future[None]:
        """Begin to register so many entries of each kind. What is registered stays so."""
        return self._thread.submit(self._register_all, dict(entries))

    def ready(self) -> dict[str, int]:
        """By kind, the entries that are registered so far."""
        return dict(self._ready)

    def _register_all(self, entries: Mapping[str, int]) -> None:
        try:
            for kind, count in entries.items():
                self._register(kind, count)
        except CudaError as failure:
            self._closing.set()
            _log.warning("the cache has less host memory than kv_offloading_size: %s", failure)

    def _register(self, kind: str, count: int) -> None:
        pieces = self._memory[kind]
        each = pieces[0].nbytes
        # Parts begin at pages of their own.
        step = max(1, PART // each) if each % _PAGE == 0 else len(pieces)
        while self._ready[kind] < count and not self._closing.is_set():
            first = self._ready[kind]
            part = pieces[first : first + step]
            self._registration.register(part)
            self._places.append(part.ctypes.data)
            self._ready[kind] = first + len(part)

    def close(self) -> None:
        """Give it back. No copy runs."""
        self._closing.set()
        self._thread.shutdown()
        self._registration.close()
        for place in self._places:
            self._driver.unregister(place)
        self._places.clear()
