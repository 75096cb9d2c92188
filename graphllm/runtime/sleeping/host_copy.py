"""What a GPU's regions held, in memory of the host that the driver has registered, so that copies run at full speed and
while the host does other things.

Registering touches every page and takes ten times as long as a copy. So a copy is made by the first sleep that needs
it, and kept for the next one. No torch in here.
"""

from __future__ import annotations

import contextlib
import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.host.hugepages import populate, zeros

_THREADS = 8  # that touch pages at the same time
_AT_ONCE = 256 << 20  # bytes that a thread touches


class HostCopy:
    """Registered memory, ``numbers`` as bytes. Raises MemoryError, OSError or CudaError where the host has no room for
    it."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver, self.nbytes = driver, nbytes
        self.numbers: np.ndarray = zeros(nbytes)
        parts = [self.numbers[at : at + _AT_ONCE] for at in range(0, nbytes, _AT_ONCE)]
        with ThreadPoolExecutor(_THREADS, "graphllm-sleep") as threads:
            list(threads.map(populate, parts))
        place = ctypes.c_void_p(self.numbers.ctypes.data)
        driver.call("cuMemHostRegister_v2", place, ctypes.c_size_t(nbytes), ctypes.c_uint())
        self.address = self.numbers.ctypes.data  # once it is registered

    def close(self) -> None:
        """Give the memory back."""
        if hasattr(self, "address"):
            with contextlib.suppress(CudaError):  # the context is gone
                self._driver.call("cuMemHostUnregister", ctypes.c_void_p(self.address))
            del self.address

    __del__ = close
