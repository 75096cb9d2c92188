"""Memory from the operating system in pages of 2 MB: at their size, a processor's translation of addresses and its own
reading ahead keep up with memory. No torch in here, which takes a second to import."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

HUGE = 2 << 20
_READ = 32 << 20  # bytes, a multiple of a page's
_READERS = 4
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Of linux/fs.h, since Linux 6.7: tells which of a process's own pages are of what kind.
_PAGEMAP_SCAN = 0xC0606610
_PAGE_IS_HUGE = 1 << 6
_MAP_FIXED = 0x10


def zeros(nbytes: int) -> np.ndarray:
    """Zero bytes, at the start of a page, that the operating system clears when they are first touched. Not malloc's,
    which may have kept some that it would clear at once. Raises MemoryError."""
    try:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as failure:
        raise MemoryError(str(failure)) from failure
    with contextlib.suppress(OSError):  # a kernel without such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def available() -> int:
    """Bytes of memory that can still be had; files that are kept in memory count, they would give way."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30


def file_bytes(path: Path) -> np.ndarray:
    """A file that is not empty, read only. It is mapped, and so in memory once for all processes, where the operating
    system keeps it in pages of 2 MB; what it keeps in smaller ones is read into such pages of our own, where there are
    any, but nothing of a file larger than half of the memory that is left. Raises OSError, and MemoryError."""
    with path.open("rb") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
        if len(whole) <= available() // 2 and _gives_large_pages():
            _enlarge(whole, file.fileno())
    return whole


def _gives_large_pages() -> bool:
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _enlarge(whole: np.ndarray, fd: int) -> None:
    """Put pages of 2 MB with the same bytes in the place of all smaller ones of a mapped file. The map's owner unmaps
    them with the rest."""
    base = whole.ctypes.data
    first, end = -(-base // HUGE) * HUGE, (base + len(whole)) // HUGE * HUGE
    if first >= end:
        return
    int(whole[first - base : end - base : HUGE].sum())  # only pages that were touched are known
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    with ThreadPoolExecutor(min(_READERS, len(os.sched_getaffinity(0)))) as pool:
        for start, stop in list(_small(first, end)):
            size = stop - start
            if libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, own, -1, 0) != start:
                raise MemoryError(f"{size / 1e9:.2f} GB: {os.strerror(ctypes.get_errno())}")
            libc.madvise(start, size, mmap.MADV_HUGEPAGE)
            parts = [(at, min(_READ, stop - at)) for at in range(start, stop, _READ)]
            list(pool.map(lambda part: _fill(fd, part[0], part[1], part[0] - base), parts))
            libc.mprotect(start, size, mmap.PROT_READ)


def _fill(fd: int, address: int, count: int, offset: int) -> None:
    into = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
    while into:
        got = os.preadv(fd, [into], offset)
        if got == 0:
            raise OSError("the file ends too early: it has changed since it was opened")
        into, offset = into[got:], offset + got


def _small(first: int, end: int) -> Iterator[tuple[int, int]]:
    """What is not in pages of 2 MB between two multiples of them, as (start, stop); all, where the system is silent."""
    most = (end - first) // HUGE
    found = (ctypes.c_uint64 * (3 * most))()  # start, stop and kind of each stretch
    huge = _PAGE_IS_HUGE
    asked = struct.pack("12Q", 96, 0, first, end, 0, ctypes.addressof(found), most, 0, 0, huge, 0, huge)
    try:
        with open("/proc/self/pagemap", "rb") as pages:
            count = fcntl.ioctl(pages, _PAGEMAP_SCAN, bytearray(asked))
    except OSError:
        count = 0
    for i in range(count):
        if first < found[3 * i]:
            yield first, found[3 * i]
        first = found[3 * i + 1]
    if first < end:
        yield first, end
