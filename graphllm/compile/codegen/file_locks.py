"""Turns among processes that compile beside each other. On the GPU: one that times kernels has it alone, those that
only run some share it. At a kernel: one compiles it, and who needs the same one waits and finds it in Triton's cache.
Turns are kept by locks of files, which end with whoever holds them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path | None, alone: bool) -> Iterator[None]:
    """The GPU alone, or with all the others that share it. Who waits to have it alone comes before those that begin
    to wait later. folder: of the locks; None where no other process compiles."""
    if folder is None:
        yield
        return
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with (folder / "gpu").open("w") as gpu:
        with (folder / "next").open("w") as first:
            fcntl.flock(first, how)
            fcntl.flock(gpu, how)
        yield


@contextlib.contextmanager
def kernel_turn(folder: Path | None, kernel: str) -> Iterator[None]:
    """Compile this kernel, or find it compiled. kernel: what it is compiled from. folder: see `turn`."""
    if folder is None:
        yield
        return
    with (folder / hashlib.sha256(kernel.encode()).hexdigest()[:16]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
