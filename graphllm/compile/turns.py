"""Turns on the GPU while processes compile for it: one that times kernels has it alone, those that only run some share
it. Turns are kept by locks of two files, which end with whoever holds them."""

from __future__ import annotations

import contextlib
import fcntl
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
