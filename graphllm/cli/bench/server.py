"""A `graphllm serve` process of one's own on a free loopback port, for measurements that need a fresh server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

_KEY_VARIABLE = "GRAPHLLM_API_KEY"  # it would close the server to us
_POLL_SECONDS = 0.01
_LOG_TAIL = 3000  # characters of the log that an error shows


class ServerError(RuntimeError):
    """The server did not do what was expected; the message has the end of its log."""


class Process(NamedTuple):
    """One of the server's processes. rss: resident bytes. cpu: seconds in user and system mode so far."""

    pid: int
    parent: int
    session: int
    state: str
    rss: int
    cpu: float


class ServerProcess:
    """Starts the server; leaving ``with`` ends it, whatever happened. command: what to run in front of the options.

    started: the clock reading (`time.perf_counter`) right before the process was made.
    """

    def __init__(
        self, options: Sequence[str], command: Sequence[str] = (sys.executable, "-m", "graphllm.cli", "serve")
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._log = tempfile.NamedTemporaryFile(prefix="graphllm-serve-", suffix=".log")  # noqa: SIM115 - closed by __exit__
        self.started = time.perf_counter()
        # In a session of its own, as may be its children: so all of them can be found, also when it is gone.
        self._process = subprocess.Popen(
            [*command, *options, "--host", "127.0.0.1", "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != _KEY_VARIABLE},
        )
        self._sessions = {self._process.pid}
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        """Of the front process."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server printed."""
        return Path(self._log.name).read_text(errors="replace")

    def wait_for(self, path: str, timeout: float) -> float:
        """Ask for a path until it answers with 200; seconds since the start. Raises ServerError."""
        while True:
            status = self._status(path)
            seconds = time.perf_counter() - self.started
            if status == 200:
                return seconds
            if self._process.poll() is not None:
                raise self.failed(f"the server ended with status {self._process.returncode}")
            if seconds > timeout:
                raise self.failed(f"{path} gave {status or 'no answer'} for {timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def get(self, path: str) -> str:
        """The body of a GET. Raises OSError or HTTPException."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def stop(self, timeout: float) -> float:
        """SIGTERM, and wait until none of its processes is left; the seconds. Raises ServerError when it does not end
        in time, leaves a process running, or ends with a status that says something went wrong."""
        self.processes()  # learns the sessions of its children
        begun = time.perf_counter()
        self._process.terminate()
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired as late:
            raise self.failed(f"the server still runs {timeout:g} s after SIGTERM") from late
        seconds = time.perf_counter() - begun
        if status not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            raise self.failed(f"the server ended with status {status} after SIGTERM")
        while left := self.processes():
            if time.perf_counter() - begun > timeout:
                raise self.failed(f"processes {[p.pid for p in left]} still run after SIGTERM")
            time.sleep(_POLL_SECONDS)
        return seconds

    def processes(self) -> list[Process]:
        """The server's processes that are alive, the front first."""
        alive = [p for p in map(_read, Path("/proc").glob("[0-9]*")) if p is not None and p.state != "Z"]
        while True:
            own = [p for p in alive if p.session in self._sessions]
            pids = {p.pid for p in own}
            found = {p.session for p in alive if p.parent in pids} - self._sessions
            if not found:
                return sorted(own, key=lambda p: (p.pid != self.pid, p.pid))
            self._sessions |= found

    def failed(self, problem: str) -> ServerError:
        """An error that shows the end of the log."""
        return ServerError(f"{problem}; the end of its log:\n{self.log[-_LOG_TAIL:].strip()}")

    def _status(self, path: str) -> int | None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()


def _read(folder: Path) -> Process | None:
    """From /proc; None when it is gone."""
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    cpu = (int(fields[11]) + int(fields[12])) / ticks
    rss = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return Process(int(folder.name), int(fields[1]), int(fields[3]), fields[0], rss, cpu)
