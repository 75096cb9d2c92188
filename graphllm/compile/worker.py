"""The program that build processes come from, ``python -m graphllm.compile.worker SOCKET...``: it imports what they
need, forks one for each socket, and says when one has ended (`graphllm.compile.workers`). Each takes jobs from its
socket and answers on it, until it is closed."""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from pathlib import Path

from graphllm.compile.backends import Backend
from graphllm.compile.jobs import Build, Candidate, Done, Failed
from graphllm.compile.objects import BuildError
from graphllm.compile.pipeline import open_backend
from graphllm.compile.tune import Tunable, build_candidate
from graphllm.compile.workers import Ended, Start, receive, send
from graphllm.config import CompileConfig, ConfigError
from graphllm.ir.registry import load_ops, load_passes


def main(sockets: list[int]) -> None:
    """Know the ops, passes and compilers, fork, and wait for those that were forked."""
    said = os.fdopen(os.dup(1), "wb")
    start: Start = receive(sys.stdin.buffer, Start)
    load_ops()
    load_passes()
    backend = open_backend(start.config, None, Path(start.turns))
    sink = os.open(os.devnull, os.O_WRONLY)  # what Inductor prints is for nobody
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    gc.freeze()  # so that collections leave alone what processes share
    pids = {}
    for i, own in enumerate(sockets):
        others = [said.fileno(), *(number for number in sockets if number != own)]
        pids[_fork(own, others, backend, start.config)] = i
    for number in sockets:
        os.close(number)
    while pids:
        pid, status = os.wait()
        send(said, Ended(pids.pop(pid), os.waitstatus_to_exitcode(status)))


def _fork(own: int, others: list[int], backend: Backend, config: CompileConfig) -> int:
    """A process that serves a socket and has not the others open; its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for other in others:
            os.close(other)
        serve(socket.socket(fileno=own), backend, config)
        status = 0
    finally:
        os._exit(status)  # Python would take itself apart for a second


def serve(connection: socket.socket, backend: Backend, config: CompileConfig) -> None:
    """Do jobs as they come; failures go back as answers."""
    with connection.makefile("rwb") as pipe:
        while True:
            try:
                job = receive(pipe, Build | Candidate)
            except EOFError:
                return
            try:
                answer: Done | Failed = _do(job, backend, config)
            except Exception as error:
                known = {ConfigError: "config", BuildError: "build"}
                kind = next((name for of, name in known.items() if isinstance(error, of)), "other")
                message = str(error) if kind != "other" else f"{type(error).__name__}: {error}"
                answer = Failed(kind, message, traceback.format_exc())  # type: ignore[arg-type]
            send(pipe, answer)


def _do(job: Build | Candidate, backend: Backend, config: CompileConfig) -> Done:
    if isinstance(job, Build):
        return Done(built=backend.build(job.piece, job.bucket, config, job.choices))
    return Done(problem=build_candidate(Tunable(job.op, job.tensors | job.plain, job.sizes, []), job.choice))


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
