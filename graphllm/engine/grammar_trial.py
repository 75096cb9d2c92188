"""Whether a grammar compiles within limits of time and memory, found out in a process of its own.

The library knows no limit for some schemas (20 s and 4 GB for 1 KiB of them), and what it compiles cannot leave its
process. So what is not certainly cheap is compiled there first, and again here once it is known what that takes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import msgspec

from graphllm.config import ConfigError
from graphllm.config.sampling import StructuredOutputsParams
from graphllm.engine.request import QueueFullError

CPU_SECONDS = 3
MEMORY_MB = 512
_WALL_SECONDS = 20.0  # where other programs take the CPU
_START_SECONDS = 120.0
MAX_WAITING = 8
_KEPT = 1024  # answers


class Setup(msgspec.Struct):
    """First line to the process; the others are StructuredOutputsParams."""

    folder: str
    vocab: int
    stop_ids: list[int]


class GrammarTrial:
    """Asks the process, one grammar at a time; it starts with the first one and stays. For several threads."""

    def __init__(self, tokenizer_folder: Path, vocab: int, stop_ids: frozenset[int]) -> None:
        self._setup = Setup(str(tokenizer_folder), vocab, sorted(stop_ids))
        self._answers: OrderedDict[bytes, str] = OrderedDict()  # what is wrong; empty: nothing
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._waiting = 0

    def check(self, field: str, spec: StructuredOutputsParams) -> None:
        """Raises ConfigError for what does not compile within the limits, QueueFullError when too many wait."""
        asked = msgspec.json.encode(spec)
        if asked not in self._answers:
            self._waiting += 1
            try:
                if self._waiting > MAX_WAITING:
                    raise QueueFullError(f"{MAX_WAITING} large grammars wait to be checked; try again later")
                with self._turn:
                    if asked not in self._answers:
                        self._answers[asked] = self._ask(field, asked)
                        while len(self._answers) > _KEPT:
                            self._answers.popitem(last=False)
            finally:
                self._waiting -= 1
        if wrong := self._answers.get(asked, ""):
            raise ConfigError(wrong)

    def _ask(self, field: str, asked: bytes) -> str:
        if self._process is not None and self._process.poll() is not None:  # somebody has ended it
            _end(self._process)
            self._process = None
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(asked + b"\n")
        process.stdin.flush()
        answer = _line(process, _WALL_SECONDS)
        if answer is not None:
            return msgspec.json.decode(answer, type=str)
        self._process = None
        what = f"{CPU_SECONDS} s" if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL) else f"{MEMORY_MB} MiB"
        return f"structured_outputs.{field}: takes more than {what} to compile; give a simpler one"

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-P", "-m", "graphllm.engine.grammar_worker"]
        # One arena: threads would reserve address space, which is limited.
        environment = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
        process.stdin.flush()
        if _line(process, _START_SECONDS) is None:
            raise RuntimeError(f"the process that checks grammars ended with {process.returncode} as it started")
        return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line that a process writes; None, and the process is gone, when there is none in this time."""
    assert process.stdout is not None
    data, deadline = b"", time.monotonic() + seconds
    while not data.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
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
