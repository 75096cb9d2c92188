"""FileJob: a file that is being written or read; FileStats: how all of them went."""

from __future__ import annotations

import dataclasses
import threading
from typing import Literal

import numpy as np

Outcome = Literal["written", "present", "dropped", "read", "missing", "damaged", "failed"]


class FileJob:
    """A file that is being written or read. Until it is done its memory belongs to it.

    key: of the contents.
    view: the memory.
    writes: whether the file is written.
    generation: of the contents, see `BlockFiles.clear`.
    outcome: None until it is done; "written", "present" and "read" are good ones.
    """

    __slots__ = ("_ended", "generation", "key", "outcome", "view", "writes")

    def __init__(
        self, key: bytes, view: np.ndarray, writes: bool, generation: int = 0, outcome: Outcome | None = None
    ) -> None:
        self.key, self.view, self.writes = key, view, writes
        self.generation, self.outcome = generation, outcome
        self._ended = threading.Event()
        if outcome is not None:
            self._ended.set()

    @property
    def done(self) -> bool:
        return self.outcome is not None

    @property
    def succeeded(self) -> bool:
        """Whether the contents are where they should be."""
        return self.outcome in ("written", "present", "read")

    def end(self, outcome: Outcome) -> None:
        """It is done."""
        self.outcome = outcome
        self._ended.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is done; whether it is."""
        return self._ended.wait(seconds)


@dataclasses.dataclass
class FileStats:
    """Counters of a store since its start.

    files: that there are now, as far as is known.
    written, read: files.
    present: writes of what was there.
    dropped: writes that found no room, or a disk that takes none.
    missing, damaged: reads without a file, and files that were no good, also those that a scan has found.
    failed_writes, failed_reads: which the operating system refused.
    evicted: files that made room.
    write_bytes, read_bytes, write_seconds, read_seconds: of whole files; the threads' seconds.
    """

    files: int = 0
    written: int = 0
    read: int = 0
    present: int = 0
    dropped: int = 0
    missing: int = 0
    damaged: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    evicted: int = 0
    write_bytes: int = 0
    read_bytes: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
