"""Messages from one process to several at once, through memory that they share.

The memory is a ring of bytes. The writer counts what it has written, each reader what it has read; a reader waits for
the writer's count to change, at first by looking, then in the kernel (a futex), so that a message arrives within tens
of microseconds and a process that waits takes no CPU. Nothing is pickled, and nothing but the count is waited for.

Each reader also has some words of its own, which it writes and the writer reads: signs of life.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Protocol

CAPACITY = 8 << 20  # bytes that may be on their way to the slowest reader
WORDS = 128  # 64-bit words of each reader
_HEAD = 8  # words of the writer
_LENGTH = 8  # bytes before a message
_FULL = 50e-6  # seconds between two looks at a ring that is full
_FUTEX = {"x86_64": 202, "aarch64": 98}  # number of the system call
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_SLEEP_NS = 500_000_000  # after which a reader looks again

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Timespec(0, _SLEEP_NS)


class Words(Protocol):
    """64-bit words in shared memory."""

    def __getitem__(self, at: int) -> int: ...
    def __setitem__(self, at: int, value: int) -> None: ...


class _Ring:
    """The memory, as writer and readers see it. word 0: bytes written so far. Word 0 of a reader: bytes it has read."""

    def __init__(self, fd: int, readers: int) -> None:
        self._map = mmap.mmap(fd, _size(readers))
        words = memoryview(self._map)[: 8 * (_HEAD + WORDS * readers)].cast("Q")
        self.head = words[:_HEAD]
        self.of_readers = [words[at : at + WORDS] for at in range(_HEAD, len(words), WORDS)]
        self.data = memoryview(self._map)[len(words) * 8 :]
        self._futex = ctypes.addressof(ctypes.c_uint32.from_buffer(self._map))  # the low half of word 0
        self._call = _FUTEX[platform.machine()]

    def wake(self) -> None:
        _libc.syscall(self._call, ctypes.c_void_p(self._futex), _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, seen: int) -> None:
        """Sleep until more than ``seen`` is written, or for a while."""
        expected = ctypes.c_uint32(seen & 0xFFFFFFFF)
        _libc.syscall(self._call, ctypes.c_void_p(self._futex), _WAIT, expected, ctypes.byref(_NAP), None, 0)


def _size(readers: int) -> int:
    return 8 * (_HEAD + WORDS * readers) + CAPACITY


class Writer:
    """Makes the memory. fd: what readers open it by; inherited where it is passed on."""

    def __init__(self, readers: int) -> None:
        self.fd = os.memfd_create("graphllm-broadcast")
        os.ftruncate(self.fd, _size(readers))
        self._ring = _Ring(self.fd, readers)
        self._written = 0
        self._fence = threading.Lock()

    @property
    def written(self) -> int:
        """Bytes so far."""
        return self._written

    def words(self, reader: int) -> Words:
        """A reader's own; the first one is how many bytes it has read."""
        return self._ring.of_readers[reader]

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Send a message to all. Wait for room while a reader is slow. check: called while waiting; it may raise."""
        rest = memoryview(len(message).to_bytes(_LENGTH, "little") + message)
        while rest:
            room = CAPACITY - self._written + min(words[0] for words in self._ring.of_readers)
            if not room:
                check()
                time.sleep(_FULL)
                continue
            at = self._written % CAPACITY
            count = min(len(rest), room, CAPACITY - at)
            self._ring.data[at : at + count] = rest[:count]
            with self._fence:  # what was copied is there before the count says so, on every kind of CPU
                pass
            self._written += count
            self._ring.head[0] = self._written
            self._ring.wake()
            rest = rest[count:]

    def close(self) -> None:
        """Readers keep the memory for as long as they live."""
        os.close(self.fd)


class Reader:
    """One of the readers.

    fd: of the writer's memory.
    number: of this reader.
    spin: seconds of polling before it sleeps. Polling takes a CPU, but not the interpreter.
    """

    def __init__(self, fd: int, readers: int, number: int, spin: float) -> None:
        self._ring = _Ring(fd, readers)
        self.words: Words = self._ring.of_readers[number]
        self._read, self._spin = 0, spin

    def read(self) -> bytearray:
        """The next message, once it has come."""
        return self._take(int.from_bytes(self._take(_LENGTH), "little"))

    def _take(self, count: int) -> bytearray:
        out = bytearray(count)
        done = 0
        while done < count:
            at = self._read % CAPACITY
            part = min(count - done, self._wait() - self._read, CAPACITY - at)
            out[done : done + part] = self._ring.data[at : at + part]
            done += part
            self._read += part
            self.words[0] = self._read
        return out

    def _wait(self) -> int:
        """How much is written, once that is more than was read."""
        head = self._ring.head
        if (written := head[0]) != self._read:
            return written
        until = time.perf_counter() + self._spin
        while (written := head[0]) == self._read:
            if time.perf_counter() < until:
                os.sched_yield()
            else:
                self._ring.wait(written)
        return written
