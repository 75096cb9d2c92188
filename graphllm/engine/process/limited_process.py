"""A process of its own for work that may take any time or memory: a line of JSON each for a question and its answer.

Its module sets the limits (`limit`) and ends beyond them; the next question starts another one. What it is given, and
what it answers, is plain data.
"""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

from graphllm.engine.requests.request import QueueFullError
from graphllm.host.importing import import_path
from graphllm.host.silence import Silence, threads_of

_ANSWER_SECONDS = 20.0  # in which it could run; of the CPU's time it takes less, see `limit_time`
_START_SECONDS = 120.0
_TICK = 0.25  # seconds between two looks at whether it could
MAX_WAITING = 8


class LimitedProcess:
    """Runs ``python -m module``, one question at a time; it starts with the first one and stays. For several threads.

    setup: its first line, which it answers with one of its own once it is ready.
    what: name of the waiting requests, for people.
    kept: answers that are kept for equal questions.
    """

    def __init__(self, module: str, setup: bytes, what: str, kept: int = 0) -> None:
        self._module, self._setup, self._what, self._kept = module, setup, what, kept
        self._answers: OrderedDict[bytes, bytes | int] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._waiting = 0

    def ask(self, question: bytes) -> bytes | int:
        """The answer; the exit status, where the process went beyond its limits. Raises QueueFullError when too many
        wait."""
        if (known := self._answers.get(question)) is not None:
            return known
        self._waiting += 1
        try:
            if self._waiting > MAX_WAITING:
                raise QueueFullError(f"{MAX_WAITING} {self._what} wait to be checked; try again later")
            with self._turn:
                if (known := self._answers.get(question)) is not None:  # asked by another thread before
                    return known
                answer = self._ask(question)
                if self._kept:
                    self._answers[question] = answer
                if len(self._answers) > self._kept:
                    self._answers.popitem(last=False)
                return answer
        finally:
            self._waiting -= 1

    def _ask(self, question: bytes) -> bytes | int:
        if self._process is not None and self._process.poll() is not None:  # somebody has ended it
            _end(self._process)
            self._process = None
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(question + b"\n")
        process.stdin.flush()
        answer = _line(process, _ANSWER_SECONDS)
        if answer is not None:
            return answer
        self._process = None
        return process.returncode

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", self._module]
        # One arena: threads would reserve address space, which is limited.
        environment = {**os.environ, "PYTHONPATH": import_path(), "MALLOC_ARENA_MAX": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(self._setup + b"\n")
        process.stdin.flush()
        if _line(process, _START_SECONDS) is None:
            raise RuntimeError(f"{self._module} ended with {process.returncode} as it started")
        return process


def limit_memory(bytes: int) -> None:
    """In the process: no more memory than it has now, and so much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(seconds: int) -> None:
    """In the process: no more time of the CPU than so much, from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, resource.RLIM_INFINITY))


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line that a process writes; None, and the process is gone, when there is none in this time, which counts
    while it could run."""
    assert process.stdout is not None
    data, silence = b"", Silence(lambda: threads_of(process.pid), _TICK)
    while not data.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], _TICK)
        if not readable and silence.look() < seconds:
            continue
        piece = os.read(process.stdout.fileno(), 1 << 16) if readable else b""
        if not piece:
            _end(process)
            return None
        data += piece
    return data


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # which closes its pipes
        if process.stdout is not None and select.select([process.stdout], [], [], 0)[0] == []:
            process.kill()
