"""The program that build processes come from, ``python -m graphllm.compile.worker``: it imports what they need,
forks one for each socket that it is given, and says when one has ended (`graphllm.compile.tuning.workers`). Each
takes jobs from its socket and answers on it, until it is closed."""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphllm.compile.building import open_backend
from graphllm.compile.codegen.jobs import Build, Candidate, Done, Failed, Find
from graphllm.compile.codegen.objects import BuildError
from graphllm.compile.tuning.workers import Ended, WorkerOrders, receive, send
from graphllm.config import ConfigError
from graphllm.ir.registry import load_ops, load_passes

_NICE = 5  # the process that times kernels goes first


class _Forks:
    """Processes forked so far, each with the number of its socket among all."""

    def __init__(self, start: WorkerOrders) -> None:
        self._said = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # a fork that held it would keep it open when this process is gone
        self._open = [*start.builders, *start.candidates]
        self._numbers = {own: number for number, own in enumerate(self._open)}
        self._pids: dict[int, int] = {}

    def fork(self, own: int, work: Callable[[Any], Done]) -> None:
        """A process that does the jobs of a socket and has not the others open."""
        pid = os.fork()
        if pid:
            os.close(own)
            self._open.remove(own)
            self._pids[pid] = self._numbers[own]
            return
        status = 1
        try:
            for other in (self._said.fileno(), *(number for number in self._open if number != own)):
                os.close(other)
            serve(socket.socket(fileno=own), work)
            status = 0
        finally:
            os._exit(status)  # Python would take itself apart for a second

    def wait(self) -> None:
        """Say of each when it has ended, until all have."""
        while self._pids:
            pid, status = os.wait()
            send(self._said, Ended(self._pids.pop(pid), os.waitstatus_to_exitcode(status)))


def main() -> None:
    """Know the ops and Triton, then passes and the backend; fork whoever needs no more than that."""
    start: WorkerOrders = receive(sys.stdin.buffer, WorkerOrders)
    os.nice(_NICE)
    forks = _Forks(start)
    load_ops()
    load_passes()
    if start.candidates:
        from graphllm.compile.tuning import offline

        offline.prepare()
        for own in start.candidates:
            forks.fork(own, lambda job: offline.work(start.config, job))
    backend = open_backend(start.config, None, Path(start.turns))
    backend.prepare()
    sink = os.open(os.devnull, os.O_WRONLY)  # what Inductor prints is for nobody
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    gc.freeze()  # so that collections do not touch what processes share
    for own in start.builders:
        forks.fork(own, lambda job: Done(built=backend.build(job.piece, job.bucket, start.config, job.choices)))
    forks.wait()


def serve(connection: socket.socket, work: Callable[[Any], Done]) -> None:
    """Do jobs as they come; failures go back as answers."""
    with connection.makefile("rwb") as pipe:
        while True:
            try:
                job = receive(pipe, Build | Find | Candidate)
            except EOFError:
                return
            try:
                answer: Done | Failed = work(job)
            except Exception as error:
                known = {ConfigError: "config", BuildError: "build"}
                kind = next((name for of, name in known.items() if isinstance(error, of)), "other")
                message = str(error) if kind != "other" else f"{type(error).__name__}: {error}"
                answer = Failed(kind, message, traceback.format_exc())  # type: ignore[arg-type]
            send(pipe, answer)


if __name__ == "__main__":
    main()
