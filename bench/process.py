"""A process that takes commands, both ends: JSON lines on its stdin, each answered by one on its stdout."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_LIMIT = 600.0  # seconds of one command
_TAIL = 400  # characters of a failed process's output
_MARK = "GRAPHLLM_BENCH_PROCESS"  # in the environment of a process and of all that it starts


class Commands:
    """The process's own end. Iterate over the commands, until there will be no more. Only answers go to its
    stdout: whatever libraries print there goes to stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, sys.stdin)

    def answer(self, answer: object) -> None:
        """To a command, or to being started or ended."""
        print(json.dumps(answer), file=self._answers, flush=True)


class ProcessFailedError(RuntimeError):
    """A process that gave no answer; the message has the end of what it printed."""


class Process:
    """The other end. Leaving ``with`` kills it and all that it started, in sessions of their own too.

    limit: seconds that an answer may take; env: in addition to this process's own.
    """

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None, *, limit: float = _LIMIT
    ) -> None:
        self._mark, self._limit = uuid.uuid4().hex, limit
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(env or {}), _MARK: self._mark},
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._errors.close()

    def kill(self) -> None:
        """And all that it started."""
        self._process.kill()
        while found := self.pids():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # of a command that nobody took
                pipe.close()  # type: ignore[union-attr]

    def pids(self) -> list[int]:
        """Of itself and all that it started, as far as they live."""
        entry, found = f"{_MARK}={self._mark}".encode(), []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it is gone, or another user's
                if entry in file.read_bytes().split(b"\0"):
                    found.append(int(file.parent.name))
        return found

    def started(self) -> Any:
        """Its answer to being started. Raises ProcessFailedError, as the others do."""
        return self._answer()

    def ask(self, command: object) -> Any:
        """Its answer to a command."""
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> Any:
        """Its answer to that there are no more commands."""
        self._process.stdin.close()  # type: ignore[union-attr]
        return self._answer()

    def _answer(self) -> Any:
        answers: Any = self._process.stdout
        if not select.select([answers], [], [], self._limit)[0]:
            raise ProcessFailedError(f"no answer within {self._limit:g} s")
        line = answers.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()  # it closed its stdout
        self._errors.seek(0)
        raise ProcessFailedError(f"status {status}: {self._errors.read()[-_TAIL:].strip()}")
