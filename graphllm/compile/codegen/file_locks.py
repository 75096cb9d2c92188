"""Turns among processes that compile at the same time: one compiles a kernel, and a process that needs the same kernel
waits and finds it in Triton's cache. Implemented with file locks, which the system releases when a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def kernel_turn(folder: Path | None, kernel: str) -> Iterator[None]:
    """Compile this kernel, or find it compiled.

    kernel: what it is compiled from.
    folder: of the locks; None where no other process compiles.
    """
    if folder is None:
        yield
        return
    with (folder / hashlib.sha256(kernel.encode()).hexdigest()[:16]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
