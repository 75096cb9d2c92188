"""Stores in files for the tests, and disks that fail."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np

from graphllm.runtime.tiers.files.block_files import BlockFiles
from graphllm.runtime.tiers.files.disk import Disk
from graphllm.runtime.tiers.files.file_format import file_bytes
from graphllm.runtime.tiers.files.file_job import FileJob

ENTRY = 5000  # bytes: no multiple of a page, nor of the rows of a checksum
LIMIT = 20.0  # seconds after which a test has failed


def key(number: int) -> bytes:
    return number.to_bytes(4, "little") + bytes([number % 251]) * 29


def content(number: int, size: int = ENTRY) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def opened(folder: Path, files: int | None = 100, entry: int = ENTRY, **options: object) -> BlockFiles:
    """A store that has seen its folder."""
    limit = None if files is None else files * file_bytes(entry)
    store = BlockFiles(folder, entry, limit, **options)  # type: ignore[arg-type]
    until(lambda: store.scanned)
    return store


def until(is_so: object) -> None:
    """Wait for another thread."""
    waiting = threading.Event()
    for _ in range(int(LIMIT * 500)):
        if is_so():  # type: ignore[operator]
            return
        waiting.wait(0.002)
    raise AssertionError("it did not happen")


def ended(job: FileJob) -> str:
    """The outcome of a job."""
    assert job.wait(LIMIT)
    assert job.outcome is not None
    return job.outcome


def write(store: BlockFiles, number: int, size: int = ENTRY) -> str:
    return ended(store.write(key(number), content(number, size)))


def read(store: BlockFiles, number: int, size: int = ENTRY) -> str:
    """The outcome; what was read is as it was written."""
    into = np.zeros(size, np.uint8)
    outcome = ended(store.read(key(number), into))
    assert outcome != "read" or np.array_equal(into, content(number, size))
    return outcome


def files_in(folder: Path) -> list[Path]:
    """The files of blocks."""
    return sorted(path for path in folder.glob("??/?/*"))


class FailingDisk(Disk):
    """A disk that may fail.

    errors: numbers of the errors that writing and reading give; 0: none.
    """

    write_error = read_error = 0

    def write(self, path: Path, parts: list[np.ndarray]) -> None:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        super().write(path, parts)

    def read(self, path: Path, parts: list[np.ndarray]) -> None:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        super().read(path, parts)


class SlowDisk(Disk):
    """A disk that writes only when it is let."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.let = threading.Semaphore(0)

    def write(self, path: Path, parts: list[np.ndarray]) -> None:
        self.let.acquire()
        super().write(path, parts)


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


FULL, READ_ONLY, BROKEN = errno.ENOSPC, errno.EROFS, errno.EIO
