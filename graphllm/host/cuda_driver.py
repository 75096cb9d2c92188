"""The CUDA driver, for what is done on a GPU while torch is not imported yet. No torch."""

from __future__ import annotations

import ctypes
from typing import Any


class CudaError(RuntimeError):
    """The CUDA driver refused a call; the message holds its name and the driver's words."""


class CudaDriver:
    """Raises OSError where there is none."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises CudaError."""
        self.check(getattr(self.library, name)(*arguments), name)

    def check(self, code: int, call: str) -> None:
        """Raise CudaError unless the driver returned success."""
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{call} failed: {(text.value or b'unknown error').decode()} (code {code})")

    def enter(self) -> None:
        """Make the first device's context, the one that torch takes, the calling thread's. Raises CudaError."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def current(self) -> int:
        """The calling thread's context. Raises CudaError."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def use(self, context: int) -> None:
        """Make it the calling thread's. Raises CudaError."""
        self.call("cuCtxSetCurrent", ctypes.c_void_p(context))

    def register(self, address: int, nbytes: int) -> None:
        """Let the GPU copy from and to this memory of the host by itself. Raises CudaError."""
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0)

    def unregister(self, address: int) -> None:
        """Take that back. Raises CudaError."""
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))
