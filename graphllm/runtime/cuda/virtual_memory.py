"""Memory of a GPU whose addresses stay while what lies under them comes and goes: the driver's virtual memory calls.

A region reserves its addresses once. Its memory is made of pieces, so that the first ones can be filled while the
driver still makes the others. Captured graphs and bound programs hold addresses; they stay valid. No torch in here.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

from graphllm.host.cuda_driver import CudaDriver, CudaError

PIECE = 1 << 30  # bytes of one piece at most
_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0  # CU_MEM_...: allocation and location type, access, granularity
_RDMA_SUPPORTED = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """Makes regions on one GPU.

    driver: its calls run in the current context, which is that GPU's.
    device: the GPU's number.

    Raises CudaError where the GPU has no such memory.
    """

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self.driver = driver
        place, rdma = _Location(_ON_DEVICE, device), ctypes.c_int()
        driver.call("cuDeviceGetAttribute", ctypes.byref(rdma), _RDMA_SUPPORTED, device)
        self.prop = AllocationProp(type=_PINNED, location=place, flags=_Flags(rdma=bool(rdma.value)))
        self.access = AccessDesc(place, _READ_WRITE)
        unit = ctypes.c_size_t()
        driver.call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self.prop), _MINIMUM)
        self.granularity = unit.value
        self._regions: list[weakref.ref[Region]] = []

    @property
    def regions(self) -> Iterator[Region]:
        """Those that are in use, in the order in which they were made."""
        self._regions = [ref for ref in self._regions if ref() is not None]
        yield from (region for ref in self._regions if (region := ref()) is not None)

    def region(self, nbytes: int, tag: str) -> Region:
        """A new region with its memory, zeros. It goes with its last user. Raises CudaError without enough memory."""
        made = Region(self, nbytes, tag)
        for address, size in made.map():
            self.driver.call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(), ctypes.c_size_t(size))
        self.driver.call("cuCtxSynchronize")  # other streams do not wait for that
        self._regions.append(weakref.ref(made))
        return made


class Region:
    """Addresses that are reserved, which torch takes by ``__cuda_array_interface__`` as bytes.

    nbytes: that were asked for.
    tag: with what it sleeps.
    kept: its numbers come back after every sleep.
    """

    def __init__(self, memory: VirtualMemory, nbytes: int, tag: str, kept: bool = False) -> None:
        self._memory, self._call = memory, memory.driver.call
        self.nbytes, self.tag, self.kept = nbytes, tag, kept
        unit = memory.granularity
        self._size = max(1, -(-nbytes // unit)) * unit
        self._pieces: list[tuple[int, int, int]] = []  # address, bytes and handle of those that are mapped
        found = ctypes.c_uint64()
        size, none = ctypes.c_size_t(self._size), ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(found), size, ctypes.c_size_t(), none, none)
        self.address = found.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "stream": None}

    @property
    def mapped(self) -> bool:
        """Whether there is memory under all of it."""
        return sum(nbytes for _, nbytes, _ in self._pieces) == self._size

    def map(self) -> Iterator[tuple[int, int]]:
        """Take memory for what has none; address and bytes of each piece, once it can be used. Raises CudaError when
        there is not enough; the pieces before it stay until `unmap`."""
        piece = max(1, PIECE // self._memory.granularity) * self._memory.granularity
        there = sum(nbytes for _, nbytes, _ in self._pieces)
        for start in range(there, self._size, piece):
            nbytes = min(piece, self._size - start)
            self._map_piece(self.address + start, nbytes)
            yield self.address + start, nbytes

    def _map_piece(self, address: int, nbytes: int) -> None:
        place, size, handle = ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_uint64()
        memory, none = self._memory, ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(memory.prop), none)
        try:
            self._call("cuMemMap", place, size, ctypes.c_size_t(), handle, none)
            try:
                self._call("cuMemSetAccess", place, size, ctypes.byref(memory.access), ctypes.c_size_t(1))
            except CudaError:
                self._call("cuMemUnmap", place, size)
                raise
        except CudaError:
            self._call("cuMemRelease", handle)
            raise
        self._pieces.append((address, nbytes, handle.value))

    def unmap(self) -> None:
        """Give the memory back; the addresses stay. Nothing may use it any more, nor do so later before `map`."""
        while self._pieces:
            address, nbytes, handle = self._pieces[-1]
            self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
            self._pieces.pop()
            self._call("cuMemRelease", ctypes.c_uint64(handle))

    def __del__(self) -> None:
        if hasattr(self, "address"):
            try:
                self._call("cuCtxSynchronize")
                self.unmap()
                self._call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self._size))
            except CudaError:  # the context is gone, and all of its memory
                return
