"""Trouble: clients that leave, an engine that stops, dies or hangs, shutdown, full queues, keys, limits."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graphllm.config.server import WatchConfig
from graphllm.server.supervision.engine_view import SupervisorOptions
from tests.server.live import Served
from tests.waiting import PATIENCE, gone, until

CHAT = "/v1/chat/completions"
LONG = {"prompt": "Count:", "max_tokens": 900, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "What is 12 + 7?", "max_tokens": 4, "ignore_eos": True}


class Stream:
    """An open stream of a completion, on a raw socket, so that it can be cut anywhere."""

    def __init__(self, server: Served, body: dict[str, Any] = LONG, path: str = "/v1/completions") -> None:
        self.socket = server.connect()
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + data)
        self.text = b""

    def until(self, mark: bytes) -> bytes:
        """Read until it holds ``mark``, or has ended."""
        while mark not in self.text and (data := self.socket.recv(65536)):
            self.text += data
        return self.text

    def close(self) -> None:
        self.socket.close()


@pytest.fixture(scope="module")
def bounded(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server with the limits of several tests, to save starts. `test_sigterm_lets_requests_end` ends it."""
    limits = ("--max-body-size", "100kB", "--max-num-queued-reqs", 64)
    log = ("--allowed-origin", "http://a.example", "--log-format", "json")
    server = Served(tmp_path_factory.mktemp("bounded") / "log", "--artifact", embedded_artifact, *limits, *log)
    yield server.wait_ready()
    server.process.kill()
    server.process.wait()


# --- clients that leave


def test_a_client_that_leaves_frees_its_pages(served: Served) -> None:
    streams = [Stream(served) for _ in range(6)]
    for stream in streams:
        stream.until(b"data: ")
    assert served.metric("graphllm_requests_running") > 0
    for stream in streams:
        stream.close()
    served.idle()
    assert served.get("/load") == (200, '{"server_load":0}')


def test_a_client_that_leaves_before_the_answer(served: Served) -> None:
    """Without streaming nothing is written before the end, so nobody notices by writing."""
    before = served.metric("graphllm_generation_tokens_total")
    streams = [Stream(served, {**LONG, "stream": False}) for _ in range(3)]
    served.wait(lambda: served.metric("graphllm_requests_running") > 0)
    for stream in streams:
        stream.close()
    served.idle()
    assert served.metric("graphllm_generation_tokens_total") - before < 3 * 900


def test_connections_that_break_anywhere(served: Served) -> None:
    data = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    whole = head.encode() + data
    for cut in (0, 1, 30, len(head) - 1, len(head), len(head) + 5, len(whole) - 1, len(whole)) * 5:
        with served.connect() as connection:
            connection.sendall(whole[:cut])
    served.idle()
    assert served.post("/v1/completions", SHORT)[0] == 200


def test_what_is_no_http(served: Served) -> None:
    for data, status in ((b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"), (b"GET / HTTP/9.9\r\n\r\n", b"400")):
        with served.connect() as connection:
            connection.sendall(data)
            assert status in connection.recv(4096).partition(b"\r\n")[0]


# --- limits


def test_limits(bounded: Served) -> None:
    server = bounded
    status, body, _ = server.post("/v1/completions", {"prompt": "x" * 200_000})
    assert (status, "--max-body-size" in body["error"]["message"]) == (413, True)
    with server.connect() as connection:  # chunked: nobody has said how long it will be
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(1000):  # the answer waits for a client who sends on
            connection.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        assert b" 413 " in connection.recv(4096)
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
        connection.sendall(b"x" * 8_000_000)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert b" 413 " in answer
        assert b"--max-body-size" in answer
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"x" * 100_000)
        assert b" 431 " in connection.recv(4096)
    for fields, named in (
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"n": 1025, "temperature": 1}, "n"),
        ({"prompt": [[5]] * 1025}, "prompt"),
        ({"prompt": [5], "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"temperature": "hot"}, "temperature"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": _deep(150)}}}, "body"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": _deep(110)}}}, "response_format"),
    ):
        status, body, _ = server.post("/v1/completions", {"prompt": "x", **fields})
        assert status == 400, fields
        assert body["error"]["message"].startswith(named if named != "response_format" else "structured_outputs"), body
        assert body["error"]["param"] == (None if named == "body" else named)
    for broken in (
        b"",
        b"{",
        b"[]",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'"x"',
        b"[" * 100_000,
        b'{"prompt": "\xff"}',
    ):
        status, body, _ = server.post("/v1/completions", broken)
        assert (status, type(body["error"]["message"])) == (400, str), broken
    assert server.post("/v1/completions", SHORT)[0] == 200


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def test_keys(serve: Callable[..., Served]) -> None:
    server = serve("--api-key", "one", GRAPHLLM_API_KEY="two")
    server.wait(lambda: server.get("/health/ready")[0] == 200)
    for path in ("/health", "/health/live", "/health/startup", "/ping", "/"):
        assert server.get(path)[0] == 200
    for path in ("/v1/models", "/metrics", "/docs/nothing", "/version", "/load", "/nothing", "/static-offline-docs"):
        assert server.get(path)[0] == 401
    for path in (CHAT, "/v1/completions", "/v1/messages", "/tokenize"):
        assert server.post(path, SHORT)[0] == 401
    for key, status in (("one", 200), ("two", 200), ("on", 401), ("", 401), ("one ", 200), ("three", 401)):
        found, body, _ = server.post("/v1/completions", SHORT, authorization=f"Bearer {key}")
        assert found == status
        if status == 401:
            assert body["error"]["type"] == "authentication_error"
    assert server.post("/v1/completions", SHORT, x_api_key="two")[0] == 200


def test_other_origins_and_the_log(bounded: Served) -> None:
    """CORS for whom it was allowed, and a line of JSON for each request."""
    import httpx

    server = bounded
    url = f"{server.url}/v1/completions"
    for origin, allowed in (("http://a.example", "http://a.example"), ("http://b.example", None)):
        headers = {"origin": origin, "access-control-request-method": "POST"}
        assert httpx.options(url, headers=headers).headers.get("access-control-allow-origin") == allowed
        headers = {"origin": origin, "x-request-id": f"mine-{allowed}"}
        answer = httpx.post(url, json=SHORT, headers=headers, timeout=PATIENCE)
        assert answer.headers.get("access-control-allow-origin") == allowed
        assert answer.headers["x-request-id"] == f"mine-{allowed}"
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/health").headers
    forged = httpx.post(url, json=SHORT, headers={"x-request-id": "a b"}, timeout=PATIENCE)
    assert forged.headers["x-request-id"] != "a b"
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    (mine,) = [line for line in lines if line.get("id") == "mine-None"]
    assert mine["message"] == "POST /v1/completions 200"
    assert (mine["tokens"], mine["end"], mine["level"]) == (4, "length", "info")
    assert mine["prompt"] > mine["cached"] >= 0
    assert mine["ms"] >= mine["ttft_ms"] > 0


def test_nobody_else_may_ask_from_a_page(served: Served) -> None:
    import httpx

    answer = httpx.get(f"{served.url}/v1/models", headers={"origin": "http://a.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_full_queue(bounded: Served) -> None:
    server = bounded
    streams = []
    for _ in range(2):  # as many as one step takes, and as many as may wait
        streams.append(Stream(server, {**LONG, "n": 64, "temperature": 1}))
        server.wait(lambda: server.metric("graphllm_requests_running") == 64)
    server.wait(lambda: server.metric("graphllm_requests_waiting") == 64)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", SHORT), range(4)))
    refused = [a for a in answers if a[0] == 429]
    assert len(refused) == 4
    _, body, headers = refused[0]
    assert int(headers["retry-after"]) >= 1
    assert body["error"]["type"] == "rate_limit_error"
    assert server.metric("graphllm_admission_rejections_total") == 4
    for stream in streams:
        stream.close()
    server.idle()
    assert server.post("/v1/completions", SHORT)[0] == 200


# --- shutdown


def test_sigterm_lets_requests_end(bounded: Served) -> None:
    server = bounded
    streams = [Stream(server, {**LONG, "max_tokens": 300}) for _ in range(4)]
    for stream in streams:
        stream.until(b"data: ")
    server.process.send_signal(signal.SIGTERM)
    server.wait(lambda: "shutting down" in server.log.read_text())
    status, body, _ = server.post("/v1/completions", SHORT)
    assert (status, body["error"]["message"]) == (503, "the server is shutting down")
    assert server.get("/health/ready")[0] == 503
    for stream in streams:
        assert b"data: [DONE]" in stream.until(b"data: [DONE]")
    assert server.process.wait(PATIENCE) == 0
    assert "cut off" not in server.log.read_text()


@pytest.mark.thorough
def test_sigterm_cuts_off_what_takes_too_long(serve: Callable[..., Served]) -> None:
    server = serve("--shutdown-timeout", 0.3).wait_ready()
    stream = Stream(server)
    stream.until(b"data: ")
    server.process.send_signal(signal.SIGTERM)
    text = stream.until(b"\r\n0\r\n\r\n")
    assert b"shut down" in text
    assert b"[DONE]" not in text
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.thorough
def test_a_second_signal_stops_at_once(serve: Callable[..., Served]) -> None:
    server = serve("--shutdown-timeout", 3600).wait_ready()
    engine = server.engine_pid
    stream = Stream(server)
    stream.until(b"data: ")
    server.process.send_signal(signal.SIGTERM)
    server.wait(lambda: "shutting down" in server.log.read_text())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 130
    until(lambda: gone(engine))


# --- the engine


@pytest.fixture(scope="module")
def breakable(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for two tests; `test_a_killed_engine` ends it."""
    server = Served(tmp_path_factory.mktemp("breakable") / "log", "--artifact", embedded_artifact)
    yield server.wait_ready()
    server.process.kill()
    server.process.wait()


def _in_flight(server: Served) -> Iterator[bytes]:
    """What a stream gets that was open when the engine broke."""
    stream = Stream(server)
    stream.until(b"data: ")
    yield stream.text
    yield stream.until(b"\r\n0\r\n\r\n")


@pytest.mark.thorough
def test_a_stopped_engine(breakable: Served) -> None:
    """SIGSTOP: it is seen within ten seconds, its requests fail with the cause, and it recovers when it goes on."""
    assert SupervisorOptions().silence < 9
    server = breakable
    news = _in_flight(server)
    next(news)
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        server.wait(lambda: server.get("/health/ready")[0] == 503)
        _, body = server.get("/health/ready")
        assert (json.loads(body)["status"], "silent" in json.loads(body)["cause"]) == ("unresponsive", True)
        assert b"unresponsive" in next(news)
        assert server.get("/health/live")[0] == 200
        status, answer, headers = server.post("/v1/completions", SHORT)
        assert (status, "unresponsive" in answer["error"]["message"], "retry-after" in headers) == (503, True, True)
        assert server.get("/metrics")[0] == 200
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    server.wait(lambda: server.get("/health/ready")[0] == 200)
    assert server.post("/v1/completions", SHORT)[0] == 200
    server.idle()


def test_a_killed_engine(breakable: Served) -> None:
    server = breakable
    news = _in_flight(server)
    next(news)
    os.kill(server.engine_pid, signal.SIGKILL)
    server.wait(lambda: server.get("/health/ready")[0] == 503)
    body = json.loads(server.get("/health/ready")[1])
    assert body["status"] == "dead"  # it did not have to be silent for a while first
    assert "signal 9" in body["cause"]
    assert b"signal 9" in next(news)
    assert server.get("/health/live")[0] == 503
    status, answer, _ = server.post(CHAT, {"messages": [{"role": "user", "content": "x"}]})
    assert (status, "signal 9" in answer["error"]["message"]) == (503, True)
    assert server.get("/metrics")[0] == 200
    assert server.get("/v1/models")[0] == 200
    assert server.stop() == 0


STUCK = """
import time, pathlib
def hang(logits, rows):
    while pathlib.Path({flag!r}).exists():
        time.sleep(0.1)
"""


@pytest.mark.thorough
def test_an_engine_that_is_stuck_in_a_step(serve: Callable[..., Served], tmp_path: Any) -> None:
    """A logits processor that does not return; heartbeats go on. By default it is found within ten seconds, too."""
    assert WatchConfig().step_timeout < 9
    flag = tmp_path / "hang"
    (tmp_path / "stuck_processor.py").write_text(STUCK.format(flag=str(flag)))
    options = ("--logits-processors", "stuck_processor:hang", "--restart-engine", "--step-timeout", 3)
    server = serve(*options, PYTHONPATH=str(tmp_path)).wait_ready()
    engine = server.engine_pid
    assert server.post("/v1/completions", SHORT)[0] == 200
    flag.touch()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", SHORT)))
    asking.start()
    asking.join(PATIENCE)
    ((status, answer, _),) = answers
    assert (status, "stuck" in answer["error"]["message"]) == (503, True)
    (quiet,) = re.findall(r"one step has not got on for ([\d.]+) s", server.log.read_text())
    assert float(quiet) >= 3  # as the option says
    flag.unlink()
    server.wait(lambda: server.get("/health/ready")[0] == 200 and server.engine_pid != engine)
    assert server.post("/v1/completions", SHORT)[0] == 200
    assert "--step-timeout" in server.log.read_text()


def test_a_killed_engine_comes_back(serve: Callable[..., Served]) -> None:
    server = serve("--restart-engine").wait_ready()
    first = server.post("/v1/completions", {**SHORT, "temperature": 0})[1]["choices"][0]["text"]
    tokens = server.metric("graphllm_generation_tokens_total")
    for _ in range(2):
        engine = server.engine_pid
        os.kill(engine, signal.SIGKILL)
        server.wait(lambda: server.get("/health/ready")[0] == 503)
        assert server.get("/health/live")[0] == 200
        server.wait(lambda: server.get("/health/ready")[0] == 200)
        assert server.engine_pid != engine
        again = server.post("/v1/completions", {**SHORT, "temperature": 0})[1]["choices"][0]["text"]
        assert again == first
        assert server.metric("graphllm_generation_tokens_total") > tokens
    assert server.stop() == 0


# --- starting


@pytest.mark.thorough
def test_requests_before_the_engine_is_ready(serve: Callable[..., Served]) -> None:
    server = serve()
    live, _ = server.get("/health/live")
    assert (live, server.get("/health/startup")[0]) in ((200, 503), (200, 200))
    status, answer, headers = server.post("/v1/completions", SHORT)
    if status != 200:
        assert (status, "starting" in answer["error"]["message"], "retry-after" in headers) == (503, True, True)
    server.wait_ready()
    assert server.get("/health/startup")[0] == 200
    assert server.stop() == 0
    line = next(line for line in server.log.read_text().splitlines() if "ready in" in line)
    assert all(f"{name}=" in line for name in ("imports", "open", "application", "total"))


def test_the_engines_process_is_there_before_the_command_line_is_read(embedded_artifact: Path) -> None:
    """On a GPU its import of torch is most of the start. A command line that is wrong ends it, in silence."""
    watched = (
        "import sys; sys.addaudithook(lambda event, _: event == 'subprocess.Popen' and"
        " print('pydantic_core' in sys.modules));"  # which checks options
        "from graphllm.cli import command; command()"
    )
    command = [sys.executable, "-c", watched, "serve", "--artifact", str(embedded_artifact), "--no-such-option"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "False\n", 4), done.stderr


def test_mistakes_end_the_start(cli: Any, tmp_path: Any) -> None:
    """One line that names the option, nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = cli("serve", "--port", taken.getsockname()[1])
        assert (done.code, "port is" in done.err, "Traceback" in done.err) == (2, True, False)
    (tmp_path / "file").touch()
    for options, named in (
        (["--uds", tmp_path / "file"], "uds is"),
        (["--host", "no.such.host.invalid"], "host is"),
        (["--max-body-size", "much"], "max-body-size"),
        (["--port", 99999], "port is"),
        ([tmp_path], "config.json"),
        (["--api-key", " "], "api-key"),
    ):
        done = cli("serve", *(["--port", 0] if "--port" not in options else []), *options)
        assert (done.code, named in done.err, "Traceback" in done.err) == (2, True, False), done.err


def test_a_unix_socket(serve: Callable[..., Served], tmp_path: Any) -> None:
    import httpx

    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # left behind by a server that was killed
    server = serve("--uds", path)
    client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=PATIENCE)
    server.wait(lambda: client.get("/health/ready").status_code == 200)
    assert client.post("/v1/completions", json=SHORT).status_code == 200
    assert server.stop() == 0
    assert not path.exists()
