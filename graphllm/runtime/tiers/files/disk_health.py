"""DiskHealth: whether writing to a disk is worth a try, and the few lines that the log gets of its failures."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds
_QUIET = 600.0  # seconds from one line of a kind to the next
_KINDS = {
    errno.ENOSPC: "full", errno.EDQUOT: "full",
    errno.EROFS: "read-only", errno.EACCES: "read-only", errno.EPERM: "read-only",
    errno.EISDIR: "taken", errno.ENOTEMPTY: "taken", errno.EEXIST: "taken",
    errno.ENOENT: "gone", errno.ESTALE: "gone",
}  # fmt: skip
_REMEDIES = {
    "full": "make room there, or give a smaller kv_offloading_disk_size",
    "read-only": "let this user write there",
    "taken": "a folder lies at the place of a file; remove it",
    "gone": "the folder was removed; it is made again if that is possible",
}


def kind_of(failure: OSError) -> str:
    """What an error says of the disk: full, read-only, gone, or broken; or of one place on it: taken."""
    return _KINDS.get(failure.errno or 0, "broken")


class DiskHealth:
    """Any thread may call it.

    name: of the folder, for the log.
    clock: seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._lock = threading.Lock()
        self._until, self._pause = 0.0, 0.0
        self._said = dict[str, float]()  # when the log got a line of each kind
        self._since = dict[str, int]()  # how often it happened since that line

    @property
    def may_write(self) -> bool:
        """Whether no pause is on."""
        return self._clock() >= self._until

    def wrote(self) -> None:
        """A file was written."""
        if self._pause:
            with self._lock:
                paused, self._pause = self._pause, 0.0
            if paused:
                _log.info("kv_offloading_disk %s: blocks can be written again", self._name)

    def write_failed(self, failure: OSError) -> str:
        """A file could not be written: pause, each time twice as long, unless only that file is concerned. Gives the
        kind of the failure."""
        kind = kind_of(failure)
        with self._lock:
            if self.may_write and kind != "taken":  # not for each of those that were under way together
                self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
                self._until = self._clock() + self._pause
            pause = self._pause
        remedy = _REMEDIES.get(kind, "look at the disk")
        self._warn(
            f"write {kind}", f"blocks cannot be written ({failure.strerror}); next try in {pause:.0f} s; {remedy}"
        )
        return kind

    def read_failed(self, failure: OSError) -> None:
        """A file could not be read. Its block is computed again."""
        self._warn("read", f"blocks cannot be read ({failure.strerror}), and are computed again; look at the disk")

    def damaged(self, file: str, why: str) -> None:
        """A file was damaged, and was deleted."""
        self._warn("damage", f"{file} is damaged: {why}; it is deleted, and its block is computed again")

    def _warn(self, kind: str, line: str) -> None:
        with self._lock:
            now = self._clock()
            if now < self._said.get(kind, float("-inf")) + _QUIET:
                self._since[kind] = self._since.get(kind, 0) + 1
                return
            self._said[kind] = now
            more = self._since.pop(kind, 0)
        again = f" ({more} more like this before)" if more else ""
        _log.warning("kv_offloading_disk %s: %s%s", self._name, line, again)
