"""Starts the process of an engine core. It may begin before the model is known: it imports torch while it waits for its
settings. Imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

COMMAND = (sys.executable, "-m", "graphllm.entrypoints.core_process")


class Child(NamedTuple):
    """A process that waits for its settings on stdin, and ends when that closes. started: `time.monotonic`."""

    process: subprocess.Popen[bytes]
    started: float

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()


def spawn(command: Sequence[str] = COMMAND) -> Child:
    """Start a program that calls `graphllm.engine.process.run_core`."""
    started = time.monotonic()
    # A session of its own: Ctrl-C is for the front. Its prints must not mix with the front's output.
    return Child(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True), started)
