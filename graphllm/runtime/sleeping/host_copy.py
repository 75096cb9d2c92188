"""What a GPU's regions held, in memory of the host that the driver has registered, so that copies run at full speed and
while the host does other things.

Registering touches every page and takes ten times as long as a copy. So a copy is made by the first sleep that needs
it, and kept for the next one. No torch in here.
"""

from __future__ import annotations

import contextlib

import numpy as np

from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.host.hugepages import zeros
from graphllm.runtime.cuda.registration import Registration


class HostCopy:
    """Registered memory, ``numbers`` as bytes. Raises MemoryError or CudaError where the host has no room for it."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver, self.nbytes = driver, nbytes
        self.numbers: np.ndarray = zeros(nbytes)
        with contextlib.closing(Registration(driver)) as registration:
            registration.register(self.numbers)
        self.address = self.numbers.ctypes.data  # once it is registered

    def close(self) -> None:
        """Give the memory back."""
        if hasattr(self, "address"):
            with contextlib.suppress(CudaError):  # the context is gone
                self._driver.unregister(self.address)
            del self.address

    __del__ = close
