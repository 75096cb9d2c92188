"""A server for each data parallel rank, and the supervisor that tells their health."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.config.server import ServerConfig, server_config
from graphllm.server.process.ranks.options import RankOptions
from tests.waiting import PATIENCE, gone, until


def free_ports(count: int) -> int:
    """The first of so many free ones."""
    for first in range(21000, 32000, 10):
        try:
            held = [socket.create_server(("127.0.0.1", first + n)) for n in range(count)]
        except OSError:
            continue
        for one in held:
            one.close()
        return first
    raise AssertionError("no free ports")


def get(port: int, path: str = "/health") -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except OSError:
        return 0, {}


def complete(port: int) -> dict[str, Any]:
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.loads(response.read())


def ranks_of(pid: int) -> dict[int, int]:
    """Processes of the servers by rank."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "--data-parallel-rank" in words:
            found[int(words[words.index("--data-parallel-rank") + 1])] = int(child)
    return found


def processes_below(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *processes_below(int(child))]
    return found


@pytest.fixture
def ranks(embedded_artifact: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """ranks(*options): the process of a supervisor of two, and the first port; the supervisor's is the third."""
    running = []

    def start(*options: str) -> tuple[subprocess.Popen[bytes], int]:
        first = free_ports(3)
        command = [sys.executable, "-m", "graphllm.cli", "serve", "--artifact", str(embedded_artifact), "-dp", "2"]
        command += ["--port", str(first), "--data-parallel-multi-port-external-lb"]
        command += ["--data-parallel-supervisor-port", str(first + 2), "--dp-supervisor-probe-interval-s", "0.2"]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([*command, *options], stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        running.append(process)
        return process, first

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_two_ranks_and_the_death_of_one(ranks: Any, tmp_path: Path) -> None:
    process, first = ranks("--restart-engine")
    assert until(lambda: get(first + 2)[0] == 503)
    until(lambda: get(first + 2)[0] == 200)
    status, health = get(first + 2, "/health/readiness")
    assert (status, health["status"]) == (200, "ready")
    assert [(one["rank"], one["port"], one["status"]) for one in health["ranks"]] == [
        (0, first, "ready"), (1, first + 1, "ready"),
    ]  # fmt: skip
    texts = [complete(port)["choices"][0]["text"] for port in (first, first + 1)]
    assert texts[0] == texts[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{first + 1}/metrics", timeout=PATIENCE) as response:
        assert 'vllm:num_requests_running{engine="1"' in response.read().decode()
    if len(os.sched_getaffinity(0)) > 1:
        shares = [os.sched_getaffinity(pid) for pid in ranks_of(process.pid).values()]
        assert not shares[0] & shares[1]
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, health = until(lambda: (found := get(first + 2))[0] == 503 and found)
    assert health["status"] == "degraded"
    assert health["ranks"][1]["status"] == "restarting"
    assert "killed by signal 9" in health["ranks"][1]["cause"]
    assert get(first + 2, "/health/liveness")[0] == 200  # it comes back
    assert complete(first)["choices"][0]["text"] == texts[0]
    until(lambda: get(first + 2)[0] == 200)
    assert complete(first + 1)["choices"][0]["text"] == texts[0]
    below = processes_below(process.pid)
    assert len(below) >= 4  # servers and their engines
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_without_restart_and_without_the_supervisor(ranks: Any) -> None:
    process, first = ranks()
    until(lambda: get(first + 2)[0] == 200)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    until(lambda: get(first + 2, "/health/liveness")[0] == 503)
    assert [one["status"] for one in get(first + 2)[1]["ranks"]] == ["dead", "ready"]
    assert complete(first + 1)["choices"]
    below = processes_below(process.pid)
    process.kill()
    process.wait()
    until(lambda: gone(*below))


@pytest.mark.slow
def test_a_rank_that_stands_still(ranks: Any) -> None:
    """It does not answer, though it could; until it goes on."""
    process, first = ranks("--dp-supervisor-probe-timeout-s", "1")
    until(lambda: get(first + 2)[0] == 200)
    pid = ranks_of(process.pid)[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: get(first + 2, "/health/liveness")[0] == 503)
        assert [one["status"] for one in get(first + 2)[1]["ranks"]] == ["ready", "unhealthy"]
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: get(first + 2)[0] == 200 and get(first + 2, "/health/liveness")[0] == 200)


@pytest.mark.slow
def test_a_rank_that_cannot_start_ends_all(ranks: Any, tmp_path: Path) -> None:
    process, _ = ranks("--max-model-len", "7")
    assert process.wait(PATIENCE) == 2
    assert "max_model_len is 7" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"port": 0}, "port is 0: the 2 ranks listen there"),
        ({"port": 65535}, "port is 65535"),
        ({"data_parallel_supervisor_port": 8001}, "data-parallel-supervisor-port is 8001: rank 1 listens there"),
        ({"dp_supervisor_probe_interval_s": 0.0}, r"dp-supervisor-probe-interval-s is 0\.0"),
        ({"dp_supervisor_probe_timeout_s": float("inf")}, "dp-supervisor-probe-timeout-s is inf"),
        ({"dp_supervisor_probe_failure_threshold": 0}, "dp-supervisor-probe-failure-threshold is 0"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RankOptions(server_config(changes), ranks=2, gpus=1).check()


def test_the_words_of_a_rank() -> None:
    options = RankOptions(ServerConfig(), ranks=2, gpus=1)
    assert options.words(["serve", "m", "--port", "8000"], 1) == [
        "serve", "m", "--port", "8000", "--port", "8001", "--data-parallel-rank", "1",
    ]  # fmt: skip
    assert options.words(["serve", "--", "m"], 0) == ["serve", "--port", "8000", "--data-parallel-rank", "0", "--", "m"]
