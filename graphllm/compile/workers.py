"""Processes that build pieces beside each other, seen from the one that has started them.

Each is `graphllm.compile.worker`, started as a program: a user's script needs no main guard for it. Jobs and answers
cross its pipes as msgpack, each behind its length.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import IO, Any, Literal, Self

import msgspec

from graphllm.compile.backends import Built
from graphllm.compile.objects import BuildError
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.graph import TensorSpec
from graphllm.rewrite import ImplChoice

_LENGTH = struct.Struct("<Q")


class Build(msgspec.Struct, tag=True):
    """Build a piece, given by its canonical JSON, for a bucket; see `Backend.build`. The answer is a `Built`."""

    piece: dict[str, Any]
    bucket: Bucket
    choices: dict[str, ImplChoice]


class Candidate(msgspec.Struct, tag=True):
    """Try an implementation that tuning may choose; see `graphllm.compile.tune.Tunable`. The answer is whether it can
    be built. tensors, plain: the arguments that are tensors, and the others."""

    op: str
    tensors: dict[str, TensorSpec]
    plain: dict[str, Any]
    sizes: dict[str, int]
    choice: ImplChoice


class Failed(msgspec.Struct, tag=True):
    """A job that raised. kind: of the error. trace: where."""

    kind: Literal["config", "build", "other"]
    message: str
    trace: str


class Done(msgspec.Struct, tag=True):
    """A job's answer: a `Built`, or why a candidate cannot be built, empty where it can."""

    built: Built | None = None
    problem: str = ""


def send(pipe: IO[bytes], message: object) -> None:
    """Write one message."""
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: IO[bytes], kind: Any) -> Any:
    """Read one message of this type. Raises EOFError when there is none any more."""
    head = pipe.read(_LENGTH.size)
    if len(head) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        data = pipe.read(length)
        if len(data) == length:
            return msgspec.msgpack.decode(data, type=kind)
    raise EOFError


class Workers:
    """Build processes for one config. A context manager: its end is theirs."""

    def __init__(self, config: CompileConfig, count: int) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "graphllm-build")
        self._processes = [_start() for _ in range(count)]
        for process in self._processes:
            assert process.stdin is not None
            send(process.stdin, replace(config, dump=None))
            self._idle.put(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: object, trace: TracebackType | None) -> None:
        for process in self._processes:
            assert process.stdin is not None
            if kind is not None:
                process.kill()
            with contextlib.suppress(OSError):  # a dead process does not take what is still to be written
                process.stdin.close()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            assert process.stdout is not None
            process.wait()
            process.stdout.close()

    def build(
        self, piece: Mapping[str, Any], bucket: Bucket, choices: Mapping[str, ImplChoice]
    ) -> concurrent.futures.Future[Built]:
        """What `Backend.build` makes, later."""
        return self._threads.submit(self._built, Build(dict(piece), bucket, dict(choices)))

    def problem(self, candidate: Candidate) -> concurrent.futures.Future[str]:
        """Why it cannot be built, empty where it can; later."""
        return self._threads.submit(lambda: self._run(candidate).problem)

    def _built(self, job: Build) -> Built:
        built = self._run(job).built
        assert built is not None
        return built

    def _run(self, job: Build | Candidate) -> Done:
        """Have an idle process do a job. Raises what it raised: ConfigError, else BuildError."""
        process = self._idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            send(process.stdin, job)
            answer: Done | Failed = receive(process.stdout, Done | Failed)
        except (EOFError, OSError) as end:
            raise BuildError(
                f"a build process ended with status {process.wait()}; where memory ran out, use fewer: lower --jobs"
            ) from end
        finally:
            self._idle.put(process)
        if isinstance(answer, Done):
            return answer
        if answer.kind == "config":
            raise ConfigError(answer.message)
        raise BuildError(answer.message if answer.kind == "build" else f"{answer.message}\n{answer.trace}")


def _start() -> subprocess.Popen[bytes]:
    """A worker that finds the modules this process finds, plugins among them."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-P", "-m", "graphllm.compile.worker"]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
