"""`graphllm bench startup` with a stand-in for the server, well-behaved and not."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphllm.cli.bench.app import bench_app
from graphllm.cli.bench.server import ServerError, ServerProcess
from graphllm.cli.bench.startup import read_phases, start_once
from tests.waiting import PATIENCE, gone, until

SCRIPT = '''
import argparse, json, os, pathlib, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--host"), parser.add_argument("--port", type=int), parser.add_argument("--mode", default="")
args = parser.parse_args()
notes = {"ready": time.perf_counter() + 0.5}
print("mode", args.mode, flush=True)
if args.mode == "dies":
    sys.exit("no such model")
child = None
if args.mode == "leaves":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def reply(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        ready = time.perf_counter() > notes["ready"] and args.mode != "never ready"
        if self.path == "/metrics":
            return self.reply(200, """# HELP graphllm_startup_seconds x
# TYPE graphllm_startup_seconds gauge
graphllm_startup_seconds{phase="import torch"} 1.5
graphllm_startup_seconds{phase="weights"} 0.25
""")
        self.reply(200 if ready or self.path == "/health/live" else 503, "")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if args.mode == "refuses":
            return self.reply(500, json.dumps({"error": {"message": "no"}}))
        time.sleep(0.2)
        notes["answer"] = time.perf_counter()
        events = [{"choices": [{"text": "a", "finish_reason": "length"}]},
                  {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 1}}]
        self.reply(200, "".join(f"data: {json.dumps(e)}\\n\\n" for e in events) + "data: [DONE]\\n\\n")

def end(*_):
    if args.mode == "deaf":
        return
    notes["asked to end"] = time.perf_counter()
    time.sleep(0.1)
    notes["end"] = time.perf_counter()
    pathlib.Path(__file__).with_name("notes").write_text(json.dumps(notes))
    os._exit(7 if args.mode == "fails" else 0)

signal.signal(signal.SIGTERM, end)
ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
'''


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., ServerProcess]:
    (tmp_path / "server.py").write_text(SCRIPT)
    command = (sys.executable, str(tmp_path / "server.py"))
    return lambda mode="": ServerProcess(["--mode", mode], command)


def test_a_start_is_timed(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """By the one clock that all processes have."""
    server = start()
    found = start_once(server, PATIENCE)
    whole = time.perf_counter() - server.started
    noted = json.loads((tmp_path / "notes").read_text())
    assert 0 < found.live < found.ready < found.first_token < found.first_token + found.stop < whole
    assert noted["ready"] < server.started + found.ready < noted["answer"] < server.started + found.first_token
    assert found.stop > noted["end"] - noted["asked to end"]
    assert found.phases == {"import torch": 1.5, "weights": 0.25}
    assert gone(server.pid)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("dies", "the server ended with status 1; the end of its log:\nmode dies\nno such model"),
        ("refuses", "the first completion failed: HTTP 500: no; "),
    ],
)
def test_servers_that_do_not_start(mode: str, message: str, start: Callable[..., ServerProcess]) -> None:
    server = start(mode)
    with pytest.raises(ServerError) as failure:
        start_once(server, PATIENCE)
    assert str(failure.value).startswith(message)
    assert gone(server.pid)


def test_a_server_that_is_never_ready(start: Callable[..., ServerProcess]) -> None:
    with start("never ready") as server:
        server.wait_for("/health/live", PATIENCE)
        with pytest.raises(ServerError, match=r"^/health/ready gave 503 for 1 s; .*:\nmode never ready"):
            server.wait_for("/health/ready", 1.0)
    assert gone(server.pid)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("deaf", "the server still runs 0.5 s after SIGTERM"),
        ("fails", "the server ended with status 7 after SIGTERM"),
        ("leaves", "still run after SIGTERM"),
    ],
)
def test_servers_that_do_not_stop_well(mode: str, message: str, start: Callable[..., ServerProcess]) -> None:
    with start(mode) as server:
        server.wait_for("/health/live", PATIENCE)
        pids = [p.pid for p in server.processes()]
        assert pids[0] == server.pid
        assert len(pids) == 1 + (mode == "leaves")
        assert all(p.rss > 1e6 for p in server.processes())
        assert all(p.parent == server.pid for p in server.processes()[1:])
        with pytest.raises(ServerError, match=message):
            server.stop(0.5)
    until(lambda: gone(*pids))  # what was killed takes a moment


def test_phases_that_are_not_there() -> None:
    assert read_phases('# TYPE up gauge\nup{phase="x"} 1\n') == {}


def test_bench_startup(
    start: Callable[..., ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[list[str]] = []

    def fake_process(options: list[str]) -> ServerProcess:
        asked.append(options)
        return start()

    monkeypatch.setattr("graphllm.cli.bench.startup.ServerProcess", fake_process)
    arguments = ["startup", "--model", "/models/x", "--runs", "2", "--output", str(tmp_path / "r.json"), "--quiet"]
    bench_app([*arguments, "--", "--max-model-len", "64"], standalone_mode=False)
    assert asked == [["/models/x", "--optimize", "first", "--max-model-len", "64"]] * 3
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["starts"]) == result["runs"] == 2
    ready = [s["ready"] for s in result["starts"]]
    assert result["seconds"]["ready"] == {"median": statistics.median(ready), "min": min(ready), "max": max(ready)}
    assert {phase: row["median"] for phase, row in result["phases"].items()} == {"import torch": 1.5, "weights": 0.25}
    assert "first token" in capsys.readouterr().out
