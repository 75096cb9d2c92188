"""Registration of host memory: pages that stay where they are, so that a GPU copies from and to them by itself.

The system clears a page when it is first touched. One thread, as the driver's own, clears 3 GB a second; eight clear
12. Registering what is there already takes 0.03 s a GB. No torch in here.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from graphllm.host.cuda_driver import CudaDriver
from graphllm.host.hugepages import HUGE, populate
from graphllm.host.machine import usable_cores

_THREADS = 8  # that touch pages at the same time, at most
_AT_ONCE = 2 * HUGE  # bytes: meanwhile no thread of the process can have its memory mapped, as a new thread must


class Registration:
    """Registers memory with threads that stay until `close`. driver: its calls run in the current context."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._threads = ThreadPoolExecutor(min(_THREADS, usable_cores()), "graphllm-pages")

    def register(self, memory: np.ndarray) -> None:
        """Register this memory; `CudaDriver.unregister` gives it back. Raises CudaError where there is no room."""
        whole = memory.reshape(-1)
        list(self._threads.map(_touch, [whole[at : at + _AT_ONCE] for at in range(0, whole.nbytes, _AT_ONCE)]))
        self._driver.register(memory.ctypes.data, memory.nbytes)

    def close(self) -> None:
        """End the threads. What is registered stays so."""
        self._threads.shutdown()


def _touch(memory: np.ndarray) -> None:
    with contextlib.suppress(OSError):  # of older kernels; the driver touches what is left, and says what is wrong
        populate(memory)
