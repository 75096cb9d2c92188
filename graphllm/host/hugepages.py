"""Memory from the operating system in pages of 2 MB: at their size, a processor's translation of addresses and its own
reading ahead keep up with memory. No torch in here, which takes a second to import."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

HUGE = 2 << 20  # bytes of a page


def zeros(nbytes: int) -> np.ndarray:
    """Zero bytes, at the start of a page, of a large one if there are so many, that the operating system clears when
    they are first touched. Not malloc's, which may have kept some that it would clear at once. Raises MemoryError."""
    beside = HUGE if nbytes >= HUGE else 0
    try:
        memory = mmap.mmap(-1, nbytes + beside, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as failure:
        raise MemoryError(str(failure)) from failure
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE if beside else 0
    if large := nbytes // HUGE * HUGE:  # what is left at the end is less than a page
        with contextlib.suppress(OSError):  # a kernel without such pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, large)
    return whole[start : start + nbytes]
