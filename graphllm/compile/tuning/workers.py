"""Processes that compile at the same time, as the process that has started them sees them.

One process, `graphllm.compile.worker`, imports what they need and forks them. First come the workers that find what to
tune and compile candidates: they need Triton. Then come the workers that build pieces: they need Inductor. So they
begin warm, and imported modules are in memory once. The process is started as a program, so a user's script needs no
main guard for it. Jobs and answers cross a socket of each worker as msgpack, each message after its length.

Imports nothing heavy: they are started before torch is imported here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, TypeAlias

import msgspec

from graphllm.compile.codegen.objects import BuildError
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.host.importing import import_path

if TYPE_CHECKING:
    from graphllm.compile.codegen.jobs import Build, Built, Candidate, Done, Find, Tunable
    from graphllm.rewrite import ImplChoice

Pipe: TypeAlias = IO[bytes] | io.BufferedRWPair
_LENGTH = struct.Struct("<Q")
_MOST_WORKERS = 16  # each that builds pieces holds half a gigabyte of the GPU


class WorkerOrders(msgspec.Struct):
    """Settings of the process that forks.

    config: of the compile.
    turns: see `graphllm.compile.codegen.file_locks`.
    candidates, builders: sockets of the workers to fork, by what they do.
    """

    config: CompileConfig
    turns: str
    candidates: list[int]
    builders: list[int]


class Ended(msgspec.Struct):
    """Its report that a forked worker is gone: number and exit status."""

    number: int
    status: int


def send(pipe: Pipe, message: object) -> None:
    """Write one message."""
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: Pipe, kind: Any) -> Any:
    """Read one message of this type. Raises EOFError when there is none any more."""
    head = pipe.read(_LENGTH.size)
    if len(head) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        data = pipe.read(length)
        if len(data) == length:
            return msgspec.msgpack.decode(data, type=kind)
    raise EOFError


def open_workers(config: CompileConfig) -> contextlib.AbstractContextManager[Workers | None]:
    """Processes to build in: for a GPU, or as many as ``config.jobs`` says. None where one is enough: eager pieces are
    only written down, and C++ is only generated per piece and compiled in parallel by `Backend.assemble`."""
    single = config.backend != "inductor" or config.jobs == 1
    if single or (config.target.device == "cpu" and not config.jobs):
        return contextlib.nullcontext()
    return Workers(config, config.jobs or min(_MOST_WORKERS, len(os.sched_getaffinity(0))))


class _Crew:
    """Processes that do the same, by the numbers they have among all, and threads that wait for their answers."""

    def __init__(self, first: int, pipes: list[Pipe]) -> None:
        self.pipes = {first + i: pipe for i, pipe in enumerate(pipes)}
        self.idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in self.pipes:
            self.idle.put(number)
        self.threads = concurrent.futures.ThreadPoolExecutor(max(1, len(pipes)), "graphllm-build")


class Workers:
    """Build processes for one config. A context manager: its end is theirs."""

    def __init__(self, config: CompileConfig, count: int) -> None:
        """count: of those that build pieces, and again of those that compile candidates where there are any."""
        tunes = config.target.device == "cuda" and config.tune
        self._scratch = tempfile.TemporaryDirectory(prefix="graphllm-workers-")
        self.turns = Path(self._scratch.name)
        pairs = [socket.socketpair() for _ in range(2 * count if tunes else count)]
        theirs = [end.fileno() for _, end in pairs]
        self._parent = _start(theirs)
        pipes: list[Pipe] = [end.makefile("rwb") for end, _ in pairs]
        self._builders, self._candidates = _Crew(0, pipes[:count]), _Crew(count, pipes[count:])
        for pair in pairs:  # a file keeps its socket open
            for end in pair:
                end.close()
        self._statuses: dict[int, int] = {}
        self._asking = threading.Lock()
        assert self._parent.stdin is not None
        start = WorkerOrders(replace(config, dump=None), str(self.turns), theirs[count:], theirs[:count])
        with contextlib.suppress(OSError):  # a dead one is noticed when it is asked for something
            send(self._parent.stdin, start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: object, trace: TracebackType | None) -> None:
        if self._parent.returncode is not None:
            return
        if kind is not None:
            os.killpg(self._parent.pid, signal.SIGKILL)
        self.end()
        assert self._parent.stdout is not None
        self._parent.wait()
        self._parent.stdout.close()
        self._scratch.cleanup()

    def end(self) -> None:
        """Have them end when they have done what they do, and do not wait for that."""
        for crew in (self._builders, self._candidates):
            crew.threads.shutdown(cancel_futures=True)
            for pipe in crew.pipes.values():
                with contextlib.suppress(OSError):  # a dead process does not take what is still to be written
                    pipe.close()
        assert self._parent.stdin is not None
        with contextlib.suppress(OSError):
            self._parent.stdin.close()

    def build(
        self, piece: Mapping[str, Any], bucket: Bucket, choices: Mapping[str, ImplChoice]
    ) -> concurrent.futures.Future[Built]:
        """What `Backend.build` makes, later."""
        from graphllm.compile.codegen.jobs import Build

        return self._builders.threads.submit(self._built, Build(dict(piece), bucket, dict(choices)))

    def sites(self, piece: Mapping[str, Any], bucket: Bucket) -> concurrent.futures.Future[dict[str, Tunable]]:
        """What `tune.tunables` finds, later."""
        from graphllm.compile.codegen.jobs import Find

        job = Find(dict(piece), bucket)
        return self._candidates.threads.submit(lambda: self._run(self._candidates, job).sites)

    def problem(self, candidate: Candidate) -> concurrent.futures.Future[str]:
        """Why its kernels cannot be compiled, empty where they are; later."""
        return self._candidates.threads.submit(lambda: self._run(self._candidates, candidate).problem)

    def _built(self, job: Build) -> Built:
        built = self._run(self._builders, job).built
        assert built is not None
        return built

    def _run(self, crew: _Crew, job: Build | Find | Candidate) -> Done:
        """Have an idle process do a job. Raises what it raised: ConfigError, else BuildError."""
        from graphllm.compile.codegen.jobs import Done, Failed

        number = crew.idle.get()
        try:
            send(crew.pipes[number], job)
            answer: Done | Failed = receive(crew.pipes[number], Done | Failed)
        except (EOFError, OSError) as end:
            raise BuildError(
                f"a build process ended with status {self._status(number)}; where memory ran out, use fewer: lower "
                "--jobs"
            ) from end
        finally:
            crew.idle.put(number)
        if isinstance(answer, Done):
            return answer
        if answer.kind == "config":
            raise ConfigError(answer.message)
        raise BuildError(answer.message if answer.kind == "build" else f"{answer.message}\n{answer.trace}")

    def _status(self, number: int) -> int:
        """The exit status of a process that is gone, or that of the one that should have forked it."""
        assert self._parent.stdout is not None
        with self._asking:
            while number not in self._statuses:
                try:
                    ended = receive(self._parent.stdout, Ended)
                except EOFError:
                    return self._parent.wait()
                self._statuses[ended.number] = ended.status
        return self._statuses[number]


def _start(sockets: list[int]) -> subprocess.Popen[bytes]:
    """The process that forks a worker for each socket. It finds the modules this process finds, plugins among them, and
    leads a process group, so that all can be killed at once and only this process gets Ctrl-C. CUDA is not begun in
    it, as that would not survive a fork: torch asks the driver's own tool whether there is a GPU. It stays in this
    session, because priorities count within one only."""
    command = [sys.executable, "-P", "-m", "graphllm.compile.worker"]
    environment = {**os.environ, "PYTHONPATH": import_path(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, pass_fds=sockets,
        process_group=0,
    )  # fmt: skip
