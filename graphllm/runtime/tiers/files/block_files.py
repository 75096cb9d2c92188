"""BlockFiles: blocks of the cache in files, one a block, on one rank. Reading and writing happens in threads.

Files outlive the process. Other processes may use the same folder: a file appears whole or not at all, its name says
what it holds, and a file that somebody has deleted is not there. Nothing that goes wrong with the disk reaches the
caller: a block that cannot be written or read is a block that is not there, the log gets one line of each kind, and
the counters tell how often.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from graphllm.runtime.tiers.files.disk import Disk, is_aligned, pages
from graphllm.runtime.tiers.files.disk_health import DiskHealth
from graphllm.runtime.tiers.files.file_format import (
    LONGEST_KEY,
    PAGE,
    DamagedFileError,
    check,
    file_bytes,
    key_of,
    path_of,
    write_header,
)
from graphllm.runtime.tiers.files.file_index import FileIndex
from graphllm.runtime.tiers.files.file_job import FileJob, FileStats, Outcome

_log = logging.getLogger(__name__)
_KEEPING = 60.0  # seconds from one look after the folder to the next
_LEAST_NEW = 64  # files that are written before the folder is scanned again


class BlockFiles:
    """A store. Its methods return at once, but for `close`.

    folder: holds the files of this store, and nothing else; it is made when it is needed.
    entry_bytes: of each block.
    max_bytes: of all files; None: half of the free space that there is at the start, and of these files.
    share: the part of max_bytes that is this store's.
    file_bytes: of each file.
    readers, writers: threads; a thread that writes reads first what waits to be read.
    max_writes: writes that may wait; others are dropped.
    """

    def __init__(
        self,
        folder: str | Path,
        entry_bytes: int,
        max_bytes: int | None = None,
        *,
        share: float = 1.0,
        readers: int = 2,
        writers: int = 2,
        max_writes: int = 64,
        disk: Disk | None = None,
        health: DiskHealth | None = None,
    ) -> None:
        self._disk = Disk(Path(folder)) if disk is None else disk
        self._health = DiskHealth(str(folder)) if health is None else health
        self._entry_bytes, self.file_bytes = entry_bytes, file_bytes(entry_bytes)
        self._share, self._max_writes = share, max_writes
        self._lock = threading.Lock()  # of all that follows
        self._to_read, self._to_write = threading.Condition(self._lock), threading.Condition(self._lock)
        self._to_keep, self._idle = threading.Condition(self._lock), threading.Condition(self._lock)
        self._reads, self._writes = collections.deque[FileJob](), collections.deque[FileJob]()
        self._writing = dict[bytes, FileJob]()  # also those that wait
        self._index, self._stats = FileIndex(), FileStats()
        self._generation = 0  # of the contents; `clear` begins another
        self._max_files = None if max_bytes is None else int(max_bytes * share) // self.file_bytes
        self._new = 0  # files since the last scan
        self._cleared = self._closed = self._scanned = False
        self._prepared = threading.Event()
        jobs = [("read", False)] * readers + [("write", True)] * writers
        self._threads = [threading.Thread(target=self._keep, name="graphllm-disk", daemon=True)]
        self._threads += [
            threading.Thread(target=self._work, args=(writes,), name=f"graphllm-disk-{what}", daemon=True)
            for what, writes in jobs
        ]
        for thread in self._threads:
            thread.start()

    def __contains__(self, key: bytes) -> bool:
        """Whether a file is known. Until `scanned`, older ones may not be."""
        with self._lock:
            return key in self._index

    @property
    def scanned(self) -> bool:
        """Whether the files of earlier processes are known."""
        return self._scanned

    @property
    def max_bytes(self) -> int:
        """Of all files; 0 while it is not known."""
        return (self._max_files or 0) * self.file_bytes

    def write(self, key: bytes, view: np.ndarray) -> FileJob:
        """Keep an entry in a file, unless there is one with this key. view: bytes of the host's memory."""
        self._check(key, view)
        with self._lock:
            if key in self._index:
                self._index.use(key, time.time_ns())
                self._stats.present += 1
                return FileJob(key, view, True, outcome="present")
            if key in self._writing:
                return self._writing[key]
            full = len(self._writes) >= self._max_writes or self._max_files == 0
            if full or self._closed or not self._health.may_write:
                self._stats.dropped += 1
                return FileJob(key, view, True, outcome="dropped")
            job = self._writing[key] = FileJob(key, view, True, self._generation)
            self._writes.append(job)
            self._to_write.notify()
            return job

    def read(self, key: bytes, into: np.ndarray) -> FileJob:
        """Fill an entry from its file. Where that fails the memory may hold anything."""
        self._check(key, into)
        with self._lock:
            if self._closed:
                return FileJob(key, into, False, outcome="failed")
            self._index.use(key, time.time_ns())
            job = FileJob(key, into, False, self._generation)
            self._reads.append(job)
            self._to_read.notify()
            self._to_write.notify()
            return job

    def _check(self, key: bytes, view: np.ndarray) -> None:
        if not 2 <= len(key) <= LONGEST_KEY or view.dtype != np.uint8 or view.shape != (self._entry_bytes,):
            raise ValueError(f"a key of {len(key)} bytes for {view.dtype}{view.shape}: a block has {self._entry_bytes}")

    def use(self, keys: Iterable[bytes]) -> None:
        """Copies of these blocks elsewhere are in use: their files should stay, too."""
        with self._lock:
            when = time.time_ns()
            for key in keys:
                self._index.use(key, when)

    def take_news(self, most: int | None = None) -> tuple[list[bytes], list[bytes]]:
        """Keys whose files came, and keys whose files went, since the last call; ``most`` in all, the others later."""
        with self._lock:
            return self._index.take_news(most)

    @property
    def has_news(self) -> bool:
        """Whether there is more to take."""
        return bool(self._index.news)

    def stats(self) -> FileStats:
        """The counters as of now."""
        with self._lock:
            return dataclasses.replace(self._stats, files=len(self._index))

    def clear(self) -> None:
        """Forget all blocks: none is read from here on, and their files are deleted soon."""
        with self._lock:
            self._generation += 1
            self._index.clear()
            self._cleared = True
            self._to_keep.notify()

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits, for so long at most, then stop."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._closed = True
            self._wake_all()
            self._idle.wait_for(lambda: not self._writing, seconds)
            for job in self._writes:
                self._end(job, "dropped")
            self._writes.clear()
            self._wake_all()
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))

    def _wake_all(self) -> None:
        for waiting in (self._to_read, self._to_write, self._to_keep):
            waiting.notify_all()

    # ---- threads that read and write

    def _work(self, writes: bool) -> None:
        scratch = pages(self.file_bytes)
        self._prepared.wait()
        while (job := self._next(writes)) is not None:
            start = time.perf_counter()
            try:
                outcome = self._write(job, scratch) if job.writes else self._read(job, scratch)
            except Exception:  # a thread that ends would leave jobs that never do
                _log.exception("kv_offloading_disk: %s", path_of(job.key))
                outcome = "failed"
            seconds = time.perf_counter() - start
            with self._lock:
                if outcome == "written":
                    self._stats.write_bytes += self.file_bytes
                    self._stats.write_seconds += seconds
                elif outcome == "read":
                    self._stats.read_bytes += self.file_bytes
                    self._stats.read_seconds += seconds
                evicted = self._enter(job) if outcome in ("written", "present") else []
            self._delete(evicted)
            with self._lock:
                self._end(job, outcome)

    def _next(self, writes: bool) -> FileJob | None:
        """The next job, None when there is none any more."""
        with self._lock:
            while True:
                if self._reads:
                    return self._reads.popleft()
                if writes and self._writes:
                    return self._writes.popleft()
                if self._closed and not self._writes:
                    return None
                (self._to_write if writes else self._to_read).wait()

    def _enter(self, job: FileJob) -> list[bytes]:
        """A file is there; the caller has the lock. Gives the keys whose files must go for it."""
        if job.generation == self._generation:
            self._index.add(job.key, time.time_ns())
            self._new += 1
        return self._above_limit()

    def _above_limit(self) -> list[bytes]:
        """Forget the files above the limit, the least recently used first; the caller has the lock."""
        keys = self._index.take_oldest(0 if self._max_files is None else len(self._index) - self._max_files)
        self._stats.evicted += len(keys)
        return keys

    def _end(self, job: FileJob, outcome: Outcome) -> None:
        """A job is done; the caller has the lock."""
        counter: str = outcome
        if outcome == "failed":
            counter = "failed_writes" if job.writes else "failed_reads"
        if job.writes:
            del self._writing[job.key]
        elif outcome != "read":
            self._index.remove(job.key)
        setattr(self._stats, counter, getattr(self._stats, counter) + 1)
        job.end(outcome)
        if not self._writing:
            self._idle.notify_all()
        if self._is_due:
            self._to_keep.notify()

    def _write(self, job: FileJob, scratch: np.ndarray) -> Outcome:
        if not self._health.may_write or job.generation != self._generation:
            return "dropped"
        path = path_of(job.key)
        if not self._cleared and self._disk.has(path, self.file_bytes):  # of another process
            return "present"
        header, body = scratch[:PAGE], job.view
        if not is_aligned(body):
            body = scratch[PAGE:]
            body[: self._entry_bytes] = job.view
            body[self._entry_bytes :] = 0
        write_header(header, job.key, body[: self._entry_bytes])
        try:
            self._disk.write(path, [header, body])
        except OSError as failure:
            if self._health.write_failed(failure) == "full":
                self._make_room()
            return "failed"
        self._health.wrote()
        if job.generation != self._generation:  # cleared meanwhile
            self._delete([job.key])
            return "dropped"
        return "written"

    def _read(self, job: FileJob, scratch: np.ndarray) -> Outcome:
        if job.generation != self._generation or (self._cleared and job.key not in self):
            return "missing"
        header, direct = scratch[:PAGE], is_aligned(job.view)
        body = job.view if direct else scratch[PAGE:]
        path = path_of(job.key)
        try:
            self._disk.read(path, [header, body])
            check(header, job.key, body[: self._entry_bytes])
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        except DamagedFileError as damage:
            self._drop_damaged(path, str(damage))
            return "damaged"
        except OSError as failure:
            self._health.read_failed(failure)
            return "failed"
        if not direct:
            job.view[:] = body[: self._entry_bytes]
        return "read"

    def _drop_damaged(self, path: Path, why: str) -> None:
        self._health.damaged(str(path), why)
        with contextlib.suppress(OSError):
            self._disk.delete(path)

    def _delete(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):  # it stays until a scan finds it again
                self._disk.delete(path_of(key))

    def _make_room(self) -> None:
        """The disk is full, maybe with what others have written: some files go, so that the newest find room."""
        with self._lock:
            keys = self._index.take_oldest(len(self._index) // 32 + 1)
            self._stats.evicted += len(keys)
        self._delete(keys)

    # ---- the thread that looks after the folder

    def _keep(self) -> None:
        try:
            self._disk.prepare()
        except OSError as failure:
            self._health.write_failed(failure)
        self._prepared.set()
        self._look()
        while not self._closed:
            with self._lock:
                self._to_keep.wait_for(lambda: self._closed or self._cleared or self._is_due, _KEEPING)
            self._look()
        self._remember_uses()

    @property
    def _is_due(self) -> bool:
        """Whether so much was written that other processes may have written much, too."""
        return self._new >= max(_LEAST_NEW, (self._max_files or 0) // 8)

    def _look(self) -> None:
        try:
            if self._cleared:
                self._delete_all()
            self._remember_uses()
            if not self._scanned or self._is_due or self._max_files is None:
                self._scan()
        except OSError as failure:
            self._health.read_failed(failure)
            self._scanned = True
        except Exception:
            _log.exception("kv_offloading_disk: looking after %s", self._disk.root)
            self._scanned = True

    def _delete_all(self) -> None:
        generation = self._generation
        for path, _, _ in self._disk.scan():
            key = key_of(path.name)
            if key is not None and not self._is_known(key):
                self._delete([key])
        with self._lock:
            self._cleared = self._generation != generation

    def _is_known(self, key: bytes) -> bool:
        with self._lock:
            return key in self._index or key in self._writing

    def _remember_uses(self) -> None:
        """Let files tell a later process when they were used."""
        with self._lock:
            used = self._index.take_used()
        for key, when in used.items():
            with contextlib.suppress(OSError):
                self._disk.used(path_of(key), when)

    def _scan(self) -> None:
        """See which files there are, and delete what is damaged or was left by a process that died."""
        with self._lock:
            additions, generation, self._new = self._index.additions, self._generation, 0
        self._disk.remove_survivors()
        found = dict[bytes, int]()
        for path, size, used in self._disk.scan():
            if self._closed:
                break
            key = key_of(path.name)
            if key is None or path_of(key) != path:
                continue
            if size == self.file_bytes:
                found[key] = used
            elif not self._is_known(key):
                self._drop_damaged(path, f"it has {size} bytes in place of {self.file_bytes}")
                with self._lock:
                    self._stats.damaged += 1
        free = self._disk.free() if self._max_files is None else 0
        with self._lock:
            if generation == self._generation and not self._closed:
                self._index.merge(found, additions)
            if self._max_files is None:
                own = len(self._index) * self.file_bytes
                self._max_files = int((free * self._share + own) / 2) // self.file_bytes
            evicted = self._above_limit()
            self._scanned = True
        self._delete(evicted)
