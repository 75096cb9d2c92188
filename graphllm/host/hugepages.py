"""Memory from the operating system in pages of 2 MB: at their size, a processor's translation of addresses and its own
reading ahead keep up with memory. No torch in here, which takes a second to import."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

HUGE = 2 << 20  # bytes of a page
_POPULATE_WRITE = 23  # of madvise: map the pages as if written to; since Linux 5.14


def zeros(nbytes: int) -> np.ndarray:
    """Zero bytes that the operating system clears when they are first touched. They begin at a page, at a large page if
    they fill one. malloc is not used: it may reuse memory, which it would clear at once. Raises MemoryError."""
    slack = HUGE if nbytes >= HUGE else 0
    try:
        memory = mmap.mmap(-1, nbytes + slack, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as failure:
        raise MemoryError(str(failure)) from failure
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE if slack else 0
    if large := nbytes // HUGE * HUGE:  # what is left at the end is less than a page
        with contextlib.suppress(OSError):  # a kernel without such pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, large)
    return whole[start : start + nbytes]


def give_back(address: int, nbytes: int) -> None:
    """Return the whole pages in this memory to the operating system. Its addresses stay: they hold zeros from then on,
    or, of a mapped file, what the file holds. Raises OSError."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _advise(first, last - first, mmap.MADV_DONTNEED)


def populate(memory: np.ndarray) -> None:
    """Have all pages of that memory now, writable, rather than one by one when they are touched. The interpreter is let
    go meanwhile. Raises OSError."""
    first = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(first, memory.ctypes.data + memory.nbytes - first, _POPULATE_WRITE)


def _advise(address: int, nbytes: int, advice: int) -> None:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if advise(address, nbytes, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
