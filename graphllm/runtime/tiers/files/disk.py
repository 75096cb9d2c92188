"""Disk: the calls of the operating system that write and read whole files of the disk tier.

Where the file system takes it, files pass by the page cache (O_DIRECT): it would take the memory that the tier saves.
Elsewhere files are ordinary, and their pages are given up after each use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from graphllm.runtime.tiers.files.file_format import PAGE, DamagedFileError

NEW = "new"  # folder of files that are being written
_SURVIVOR_AGE = 10.0  # seconds; a younger file may have a writer that has not locked it yet


def pages(num_bytes: int) -> np.ndarray:
    """Memory that begins at a page."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def is_aligned(view: np.ndarray) -> bool:
    """Whether files can be read into this memory and written from it without a copy."""
    return view.ctypes.data % PAGE == 0 and view.nbytes % PAGE == 0 and view.flags.c_contiguous


class Disk:
    """Files below one folder, which is made when it is first written to. Every method may raise OSError.

    root: the folder.
    direct: files pass by the page cache; `prepare` finds out.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.direct = root, False
        self._numbers = itertools.count()

    def prepare(self) -> None:
        """Make the folder, and see what its file system takes."""
        self._make(self.root / NEW)
        self.direct = self._takes_direct()

    def _make(self, *folders: Path) -> None:
        """Make folders, each inside of the one before it, that are nobody else's to read."""
        for folder in (self.root, *folders):
            try:
                os.makedirs(folder, 0o700, exist_ok=True)
            except FileExistsError as other:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from other

    def _takes_direct(self) -> bool:
        path = self._new_path()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError:  # such as on tmpfs; there may be a file, though
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        try:
            return os.pwritev(fd, [pages(PAGE).data], 0) == PAGE and os.preadv(fd, [pages(PAGE).data], 0) == PAGE
        except OSError:
            return False
        finally:
            os.close(fd)
            path.unlink()

    def _new_path(self) -> Path:
        return self.root / NEW / f"{os.getpid()}-{next(self._numbers)}-{secrets.token_hex(4)}"

    def write(self, path: Path, parts: list[np.ndarray]) -> None:
        """Write a file of these parts, each of whole pages, and put it at its place in one move. A lock tells other
        processes that it is being written."""
        new = self._new_path()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        try:
            fd = os.open(new, flags, 0o600)
        except FileNotFoundError:
            self._make(new.parent)
            fd = os.open(new, flags, 0o600)
        try:
            try:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _each(os.pwritev, fd, parts) < sum(part.nbytes for part in parts):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if not self.direct:
                    os.fdatasync(fd)  # pages that are not written yet cannot be given up
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._move(new, self.root / path)
            finally:
                os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise

    def _move(self, new: Path, place: Path) -> None:
        try:
            os.replace(new, place)
        except FileNotFoundError:
            self._make(place.parent.parent, place.parent)
            os.replace(new, place)

    def read(self, path: Path, parts: list[np.ndarray]) -> None:
        """Read a file into parts, each of whole pages. Raises FileNotFoundError where there is none,
        DamagedFileError where it has another size, or is no file."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        try:
            fd = os.open(self.root / path, flags)
        except OSError as failure:
            if failure.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL):
                raise DamagedFileError("it is no ordinary file") from failure
            raise
        try:
            found, size = os.fstat(fd), sum(part.nbytes for part in parts)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedFileError("it is no ordinary file")
            if found.st_size != size:
                raise DamagedFileError(f"it has {found.st_size} bytes in place of {size}")
            if _each(os.preadv, fd, parts) < size:
                raise DamagedFileError("it was cut while it was read")
            if not self.direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def has(self, path: Path, num_bytes: int) -> bool:
        """Whether there is a file of this size."""
        try:
            found = os.stat(self.root / path, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == num_bytes

    def delete(self, path: Path) -> None:
        """Remove a file, or an empty folder that lies in its place. What another process has removed is gone."""
        try:
            (self.root / path).unlink()
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            (self.root / path).rmdir()

    def used(self, path: Path, when: int) -> None:
        """Remember when a file was last used, in nanoseconds."""
        os.utime(self.root / path, ns=(when, when))

    def free(self) -> int:
        """Bytes that can still be written."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def scan(self) -> Iterator[tuple[Path, int, int]]:
        """All that lies at the places of files: path, bytes (-1 for what is no file), nanosecond of the last use."""
        for first in _entries(self.root):
            if first.name == NEW or not first.is_dir(follow_symlinks=False):
                continue
            for second in _entries(first):
                for entry in _entries(second):
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        is_file = stat.S_ISREG(found.st_mode)
                        path = Path(first.name, second.name, entry.name)
                        yield path, found.st_size if is_file else -1, found.st_mtime_ns

    def remove_survivors(self) -> int:
        """Remove files that were being written when their process died; how many there were."""
        removed = 0
        for entry in _entries(self.root / NEW):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime < _SURVIVOR_AGE:
                    continue
                fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                    removed += 1
                finally:
                    os.close(fd)
        return removed


def _entries(folder: os.DirEntry[str] | Path) -> list[os.DirEntry[str]]:
    """What lies in a folder; nothing where there is no folder, or no longer."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _each(call: Callable[[int, list[memoryview], int], int], fd: int, parts: list[np.ndarray]) -> int:
    """Read or write parts one after another from the beginning of a file; how many bytes it were."""
    done, left = 0, [part.data for part in parts]
    while left and (count := call(fd, left, done)):
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return done
