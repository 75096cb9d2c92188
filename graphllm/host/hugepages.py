"""Memory from the operating system in pages of 2 MB: at their size, a processor's translation of addresses and its own
reading ahead keep up with memory. No torch in here, which takes a second to import."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

HUGE = 2 << 20  # bytes of a page


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
