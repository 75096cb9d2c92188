"""Turns among processes that compile at the same time.

On the GPU: a process that times kernels has exclusive use, processes that only run kernels share it. At a kernel: one
process compiles it, and a process that needs the same kernel waits and finds it in Triton's cache. Implemented with
file locks, which the kernel releases when a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path | None, exclusive: bool) -> Iterator[None]:
    """Use the GPU, exclusively or shared. A process waiting for exclusive use goes before processes that start waiting
    after it. folder: of the locks; None where no other process compiles."""
    if folder is None:
        yield
        return
    how = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    with (folder / "gpu").open("w") as gpu:
        with (folder / "next").open("w") as first:
            fcntl.flock(first, how)
            fcntl.flock(gpu, how)
        yield


@contextlib.contextmanager
def kernel_turn(folder: Path | None, kernel: str) -> Iterator[None]:
    """Compile this kernel, or find it compiled.

    kernel: what it is compiled from.
    folder: see `turn`.
    """
    if folder is None:
        yield
        return
    with (folder / hashlib.sha256(kernel.encode()).hexdigest()[:16]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
