"""FileBatches: hands files to their stores in a thread, so that who asks for many of them pays for one object."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from graphllm.runtime.tiers.files.block_files import BlockFiles
from graphllm.runtime.tiers.files.file_job import FileJob
from graphllm.runtime.tiers.host_memory import HostMemory


class FileBatch:
    """Files of one kind that are written or read.

    store: of this kind.
    kind: of the entries.
    entries: keys, and their entries of host memory.
    writes: whether the files are written.
    jobs: of the first entries, as far as the store has them.
    """

    def __init__(self, store: BlockFiles, kind: str, entries: Sequence[tuple[bytes, int]], writes: bool) -> None:
        self.store, self.kind, self.entries, self.writes = store, kind, entries, writes
        self.jobs: list[FileJob] = []
        self._num_done = 0

    @property
    def done(self) -> bool:
        """Whether all files are written or read, or have failed. Each is looked at once."""
        while self._num_done < len(self.jobs) and self.jobs[self._num_done].done:
            self._num_done += 1
        return self._num_done == len(self.entries)


class FileBatches:
    """memory: where the entries are."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory, self._lock = memory, threading.Lock()
        self._generation = 0  # batches of an earlier one are dropped
        self._waiting = queue.SimpleQueue[tuple[int, FileBatch] | None]()
        self._thread = threading.Thread(target=self._run, name="graphllm-disk-batches", daemon=True)
        self._thread.start()

    def begin(self, batch: FileBatch) -> None:
        """Have a batch written or read, after those before it."""
        self._waiting.put((self._generation, batch))

    def drop(self) -> None:
        """No store gets more of what was begun so far."""
        with self._lock:
            self._generation += 1

    def close(self) -> None:
        """Give the stores what waits."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            generation, batch = waiting
            act = batch.store.write if batch.writes else batch.store.read
            for key, entry in batch.entries:
                view = self._memory.entry(batch.kind, entry)
                with self._lock:
                    if generation == self._generation:
                        job = act(key, view)
                    else:
                        job = FileJob(key, view, batch.writes, outcome="dropped")
                batch.jobs.append(job)
