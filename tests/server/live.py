"""A real server for tests: `graphllm serve` in a process of its own, on a free loopback port."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE, until


class Served:
    """A server that was started with these options of `graphllm serve`. log: the file of its stderr."""

    verb = "serve"

    def __init__(
        self, log: Path, *options: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.log = log
        command = [sys.executable, "-m", "graphllm.cli", self.verb, "--port", "0", *map(str, options)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stderr=file,
                stdout=file,
                cwd=cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        found = self.wait(lambda: re.search(r"listening on ([^\s\"]+)", self.log.read_text()))
        self.url = found[1]

    def wait(self, look: Callable[[], Any]) -> Any:
        """What ``look`` returns once it is true, while the server lives."""
        return until(look, process=self.process, what=self.log.read_text)

    def logged(self, text: str) -> str:
        """The log once it has this text; the line of a request is written after its answer."""
        self.wait(lambda: text in self.log.read_text())
        return self.log.read_text()

    def wait_ready(self) -> Served:
        """Until it takes requests."""
        self.wait(lambda: self.get("/health/ready")[0] == 200)
        return self

    def connect(self) -> socket.socket:
        """A connection for what no client would send."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and body."""
        try:
            request = urllib.request.Request(self.url + path, headers=headers)
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Status, JSON and headers. body: JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data,
            {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, json.loads(response.read()), dict(response.headers)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), dict(error.headers)

    def events(self, path: str, body: Any) -> list[Any]:
        """The JSON of each event of a stream."""
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, kind), timeout=PATIENCE) as response:
            return [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]

    def metric(self, name: str, **headers: str) -> float:
        """The sum over all labels."""
        text = self.get("/metrics", **headers)[1]
        lines = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}[ {{]", line)]
        assert lines, name
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    @property
    def engine_pids(self) -> list[int]:
        """Of the engine's processes, the children that run a core."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(c) for c in children if b"loading.core.core_main" in Path(f"/proc/{c}/cmdline").read_bytes()]

    @property
    def engine_pid(self) -> int:
        """Of the engine's process, where there is one."""
        found = self.engine_pids
        assert len(found) == 1, found
        return found[0]

    def idle(self) -> None:
        """Wait until nothing runs and no page of the cache is held."""
        names = ("graphllm_kv_cache_usage_ratio", "graphllm_requests_running")
        until(lambda: not any(map(self.metric, names)), what=lambda: self.get("/metrics")[1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
