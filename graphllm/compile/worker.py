"""The program of a build process, ``python -m graphllm.compile.worker``: it takes jobs from `graphllm.compile.workers`
on stdin and answers on stdout, until stdin ends."""

from __future__ import annotations

import os
import sys
import traceback

from graphllm.compile.backends import Backend
from graphllm.compile.objects import BuildError
from graphllm.compile.pipeline import open_backend
from graphllm.compile.workers import Build, Candidate, Done, Failed, receive, send
from graphllm.config import CompileConfig, ConfigError
from graphllm.ir.registry import load_ops, load_passes


def main() -> None:
    """Know the ops and passes, and drop what Inductor prints; failures go back as answers."""
    answers = os.fdopen(os.dup(1), "wb")
    config = receive(sys.stdin.buffer, CompileConfig)
    load_ops()
    load_passes()
    backend = open_backend(config, None)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    while True:
        try:
            job = receive(sys.stdin.buffer, Build | Candidate)
        except (EOFError, KeyboardInterrupt):  # Ctrl-C reaches this process, too
            return
        try:
            answer: Done | Failed = _do(job, backend, config)
        except Exception as error:
            kind = "config" if isinstance(error, ConfigError) else "build" if isinstance(error, BuildError) else "other"
            message = str(error) if kind != "other" else f"{type(error).__name__}: {error}"
            answer = Failed(kind, message, traceback.format_exc())  # type: ignore[arg-type]
        send(answers, answer)


def _do(job: Build | Candidate, backend: Backend, config: CompileConfig) -> Done:
    if isinstance(job, Build):
        return Done(built=backend.build(job.piece, job.bucket, config, job.choices))
    from graphllm.compile.tune import Tunable, build_candidate

    return Done(problem=build_candidate(Tunable(job.op, job.tensors | job.plain, job.sizes, []), job.choice))


if __name__ == "__main__":
    main()
