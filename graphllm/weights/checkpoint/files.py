"""Files of weights, read at any place by several threads. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from graphllm.weights.checkpoint.tensor_info import WeightError


@contextlib.contextmanager
def opened(files: Iterable[Path]) -> Iterator[dict[Path, int]]:
    """File descriptors of the files."""
    with contextlib.ExitStack() as stack:
        fds = {}
        for file in files:
            fds[file] = os.open(file, os.O_RDONLY)
            stack.callback(os.close, fds[file])
        yield fds


def read_into(buffer: memoryview, file: Path, fd: int, offset: int) -> None:
    """Fill the buffer with a file's bytes from ``offset`` on. Raises WeightError when the file ends before them."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise WeightError(file, ["ends too early: the file has changed since it was opened"])
        done += count
