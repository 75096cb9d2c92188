"""One build of an artifact at a time, over all processes of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def build_lock(place: Path) -> Iterator[None]:
    """Hold the right to build the artifact at ``place``; waits, and says so, while another process has it.

    The lock is a file in the artifact's parent folder. The kernel frees it when its holder ends, however that happens.
    """
    try:
        descriptor = _locked(place.with_name(f".{place.name}.lock"))
    except OSError:  # nothing can be written there, which the build says better, or the file system has no locks
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            place.with_name(f".{place.name}.lock").unlink()
        os.close(descriptor)


def is_locked(place: Path) -> bool:
    """Whether a process builds the artifact at ``place`` now."""
    try:
        descriptor = os.open(place.with_name(f".{place.name}.lock"), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _locked(file: Path) -> int:
    """A descriptor of the locked file. Its holder removes it in the end, so who has waited may have a file that is no
    longer the one others see, and tries again."""
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.warning("another process compiles this artifact; waiting for it (%s)", file)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), file.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
