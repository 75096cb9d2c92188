"""The processes of engine cores that a test has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from graphllm.engine.process.spawn import COMMAND


def core_pids() -> list[int]:
    """The cores that this process has started and that live, in the order of their start: an engine's cores by their
    numbers, a restarted one last."""
    return [pid for _, pid in sorted(_started())]


def _started() -> Iterator[tuple[int, int]]:
    """Of each core, when it started, in clock ticks, and its process."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
            if COMMAND[-1] in words:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    yield int(fields[19]), int(entry.name)
        except (FileNotFoundError, ProcessLookupError):  # gone since
            continue
