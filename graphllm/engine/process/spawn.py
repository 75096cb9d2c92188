"""Starts the process of an engine core. It may begin before the model is known: it imports torch while it waits for its
settings. Imports nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from graphllm.engine.process.placement import gpus_of
from graphllm.host.importing import import_path

COMMAND = (sys.executable, "-m", "graphllm.loading.core.core_main")


class Child(NamedTuple):
    """A process that waits for its settings on stdin, and ends when that closes. started: `time.monotonic`."""

    process: subprocess.Popen[bytes]
    started: float

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()


def spawn(command: Sequence[str] = COMMAND, gpus: str | None = None, ranks: int = 1) -> Child:
    """Start a program that calls `graphllm.engine.process.core_loop.run_core`.

    gpus: GPUs that it sees, as in CUDA_VISIBLE_DEVICES; None: this process's.
    ranks: of the engine, as far as is known; their processes start at once, too.
    """
    started = time.monotonic()
    command = command if ranks == 1 else (*command, str(ranks))
    env = {**os.environ, "PYTHONPATH": import_path()} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    # A session of its own: Ctrl-C is for the front. Its prints must not mix with the front's output.
    return Child(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True, env=env), started)


def end(children: list[Child]) -> None:
    """Kill them, whatever they do; the list is empty then."""
    while children:
        children.pop().kill()


def spawn_cores(count: int, ranks: int, early: list[Child]) -> list[Child]:
    """Start a process for each engine core. Several cores get GPUs of their own, one for each rank.

    count: engine cores.
    ranks: of each core.
    early: processes that `spawn` started before these numbers were known; a process that fits is taken from the list.
    """
    if count == ranks == 1 and early:
        return [early.pop()]
    return [spawn(gpus=None if count == 1 else gpus_of(core, ranks), ranks=ranks) for core in range(count)]
