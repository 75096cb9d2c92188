"""A file's lock, with which several users of a machine take turns."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

_LONGEST = 150.0  # seconds after which others may have it


class Lock:
    """Held over several steps, because waiting for it may take long, but no step begins after some time. ``file``
    None: there are no others."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._handle: IO[str] | None = None
        self._since = 0.0

    def step(self) -> None:
        """Have it for one more step."""
        if time.monotonic() - self._since > _LONGEST:
            self.release()
        if self._file is not None and self._handle is None:
            self._handle = self._file.open("a")
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            self._since = time.monotonic()

    def release(self) -> None:
        """Let others have it."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
            time.sleep(1)  # for those who wait
