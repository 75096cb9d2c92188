"""Many copies between a GPU and registered host memory in one call of the driver: thousands of pieces cost the host a
few microseconds, and the copy engines are fed without a pause. No torch in here."""

from __future__ import annotations

import ctypes

import numpy as np

from graphllm.host.cuda_driver import CudaDriver

STREAM, ANY = 1, 3  # CUmemcpySrcAccessOrder: sources are read in the stream's order, or at any time from the call on


class _Location(ctypes.Structure):
    """CUmemLocation; zeros: the driver finds out."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """driver: its calls run in the current context. Drivers before CUDA 12.8 copy piece by piece."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._batched = hasattr(driver.library, "cuMemcpyBatchAsync")

    def copy(self, targets: np.ndarray, sources: np.ndarray, nbytes: int, stream: int, order: int) -> None:
        """Copy pieces of so many bytes. Raises CudaError.

        targets, sources [n]: addresses.
        stream: handle of the stream, not the default one.
        order: STREAM or ANY.
        """
        count = len(targets)
        if not count:
            return
        to, of = (np.ascontiguousarray(a, dtype=np.uint64) for a in (targets, sources))
        if not self._batched:
            for target, source in zip(to.tolist(), of.tolist(), strict=True):
                self._driver.call(
                    "cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes),
                    ctypes.c_void_p(stream),
                )  # fmt: skip
            return
        sizes = np.full(count, nbytes, dtype=np.uint64)
        attributes, first, failed = _Attributes(order=order), ctypes.c_size_t(0), ctypes.c_size_t()
        self._driver.call(
            "cuMemcpyBatchAsync", _pointer(to), _pointer(of), _pointer(sizes), ctypes.c_size_t(count),
            ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )  # fmt: skip


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
