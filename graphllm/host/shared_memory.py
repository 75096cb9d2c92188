"""Memory without a name that several processes map: it is gone when the last of them is, however they end."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np


def shared_zeros(nbytes: int) -> tuple[int, np.ndarray]:
    """A file descriptor, and zero bytes behind it that the operating system gives when they are first touched. Raises
    MemoryError."""
    try:
        fd = os.memfd_create("graphllm-host-memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(1, nbytes))
        memory = mmap.mmap(fd, max(1, nbytes))
    except OSError as failure:
        raise MemoryError(str(failure)) from failure
    with contextlib.suppress(OSError):  # a kernel without large pages for such memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return fd, np.frombuffer(memory, dtype=np.uint8)[:nbytes]


def opened(pid: int, fd: int) -> int:
    """A descriptor of this process's own for a file that another one of this user has open. Raises OSError."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def mapped(fd: int, nbytes: int) -> np.ndarray:
    """The bytes behind a descriptor, for reading. Raises OSError, ValueError where there are fewer."""
    return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), dtype=np.uint8)
