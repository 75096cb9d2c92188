"""Two processes speak HTTP for one engine: what they share is one thing, and a dead one takes only its own along."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Served
from tests.waiting import PATIENCE, gone, until

ADMIN, NOBODY = {"authorization": "Bearer admin"}, {"authorization": ""}
RATE = 4
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
SUM = {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
ENDLESS: dict[str, Any] = {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 900}


class Client:
    """One connection, which stays with the front that has it. front: its name."""

    def __init__(self, server: Served) -> None:
        self._connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
        id = secrets.token_hex(8)
        assert self.ask("GET", "/version", **{"x-request-id": id})[0] == 200
        self.front = re.search(rf"(front-\d+) GET /version 200 id={id}", server.logged(f"id={id}"))[1]  # type: ignore[index]

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and body, which is JSON but for metrics."""
        response = self.begin(method, path, body, **headers)
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith("{") else text

    def begin(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """The answer, whose body is still to come."""
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"content-type": "application/json", **ADMIN, **headers})
        return self._connection.getresponse()

    def send(self, data: bytes) -> None:
        """Bytes of a request as they are."""
        self._connection.sock.sendall(data)

    @property
    def answered(self) -> bool:
        """Whether there is something to hear."""
        return bool(select.select([self._connection.sock], [], [], 0)[0])

    def heard(self) -> bytes:
        """What is answered next."""
        return self._connection.sock.recv(1 << 16)

    def metric(self, name: str, labels: str = "") -> float:
        _, text = self.ask("GET", "/metrics")
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")) and labels in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def pids(server: Served) -> dict[str, int]:
    """Of the fronts by their names."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    commands = {int(c): Path(f"/proc/{c}/cmdline").read_bytes().split(b"\0") for c in children}
    return {
        command[3].decode(): pid
        for pid, command in commands.items()
        if b"graphllm.server.process.fronts.front" in command
    }


def both(server: Served) -> tuple[Client, Client]:
    """A connection to each front; one may just be starting."""
    first = Client(server)
    return first, until(lambda: next((c for c in [Client(server)] if c.front != first.front), None))


def halves(server: Served, count: int) -> list[list[Client]]:
    """So many new connections to each front. One that ended just now may still count as open, so it may take some
    tries."""

    def divided() -> list[list[Client]] | None:
        clients = [Client(server) for _ in range(2 * count)]
        fronts = [[client for client in clients if client.front == name] for name in {c.front for c in clients}]
        if [len(of) for of in fronts] == [count, count]:
            return fronts
        for client in clients:
            client.close()
        return None

    return until(divided)


def events(response: http.client.HTTPResponse) -> Iterator[str]:
    """Texts of a stream of completions, up to its end, or where it breaks off."""
    with contextlib.suppress(http.client.HTTPException, OSError):
        while line := response.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0].get("text", "")
            elif line.startswith(b"data: [DONE]"):
                yield "DONE"


@pytest.fixture(scope="module")
def server(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("fronts") / "log"
    rate = ("--rate-limit-token", RATE, "--rate-limit-interval", 6000, "--admin-api-key", "admin")
    server = Served(log, "--artifact", embedded_artifact, "--api-server-count", 2, "--restart-engine", *rate)
    try:
        yield server.wait_ready()
        assert server.stop() == 0, server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()


def test_connections_are_split_evenly(server: Served) -> None:
    """Also behind the ends of some, which only the front sees that had them."""
    left, full = halves(server, 6)
    for client in left[1:]:
        client.close()

    def refilled() -> bool:
        """All that come go to the emptier one; in turn they would not, at any try."""
        new = [Client(server) for _ in range(5)]
        for client in new:
            client.close()
        return {client.front for client in new} == {left[0].front}

    until(refilled)
    for client in (left[0], *full):
        assert client.ask("GET", "/version")[0] == 200


def test_a_rate_limit_holds_for_both(server: Served) -> None:
    clients = both(server)
    answers = [clients[i % 2].ask("POST", "/tokenize", {"prompt": "a"}, **NOBODY)[0] for i in range(RATE + 4)]
    assert answers == [200] * RATE + [429] * 4


def test_a_response_is_kept_for_both(server: Served) -> None:
    """Made by one, read, continued and deleted by the other."""
    one, other = both(server)
    status, made = one.ask("POST", RESPONSES, {"input": "What is 12 + 7?", "temperature": 0})
    assert (status, made["output"][0]["content"][0]["text"]) == (200, "12 + 7 = 19.")
    assert other.ask("GET", f"{RESPONSES}/{made['id']}") == (200, made)
    status, items = other.ask("GET", f"{RESPONSES}/{made['id']}/input_items")
    assert (status, items["data"][0]["content"][0]["text"]) == (200, "What is 12 + 7?")
    turn = {"input": "What is 3 + 4?", "previous_response_id": made["id"], "temperature": 0}
    status, next_one = other.ask("POST", RESPONSES, turn)
    assert (status, next_one["usage"]["input_tokens"] > made["usage"]["total_tokens"]) == (200, True)
    assert other.ask("DELETE", f"{RESPONSES}/{made['id']}")[0] == 200
    assert one.ask("GET", f"{RESPONSES}/{made['id']}")[0] == 404


def test_a_response_in_the_background_is_cancelled_by_the_other(server: Served) -> None:
    one, other = both(server)
    body = {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 900}
    _, made = one.ask("POST", RESPONSES, body)
    assert other.ask("GET", f"{RESPONSES}/{made['id']}")[1]["status"] in ("queued", "in_progress")
    status, ended = other.ask("POST", f"{RESPONSES}/{made['id']}/cancel")
    assert (status, ended["status"]) == (200, "cancelled")
    assert one.ask("GET", f"{RESPONSES}/{made['id']}") == (200, ended)
    until(lambda: other.metric("graphllm_requests_running") == 0)


def test_metrics_are_of_both(server: Served) -> None:
    one, other = both(server)
    labels = 'route="/detokenize",status="200"'
    for client in (one, one, other):
        assert client.ask("POST", "/detokenize", {"tokens": [5]})[0] == 200
    for client in (one, other):
        assert client.metric("graphllm_http_requests_total", labels) == 3
        assert client.metric("graphllm_http_request_seconds_count", 'route="/detokenize"') == 3
        assert client.metric("graphllm_http_requests_in_flight") == 1  # this one
        assert client.metric("graphllm_engine_up") == 1
    started = other.metric("graphllm_requests_finished_total"), one.metric("graphllm_generation_tokens_total")
    assert [client.ask("POST", CHAT, SUM)[1]["usage"]["completion_tokens"] for client in (one, other)] == [11, 11]
    found = other.metric("graphllm_requests_finished_total"), one.metric("graphllm_generation_tokens_total")
    assert [now - before for now, before in zip(found, started, strict=True)] == [2, 22]


def test_an_admin_ends_requests_of_the_other(server: Served) -> None:
    one, other = both(server)
    stream = one.begin("POST", "/v1/completions", ENDLESS, **{"x-request-id": "mine"})
    news = events(stream)
    next(news)
    assert other.ask("GET", "/load") == (200, {"server_load": 1})
    assert other.ask("POST", "/abort_requests", {"request_ids": ["mine", "other"]}) == (200, {"aborted": 1})
    assert list(news)[-1] == "DONE"
    assert other.ask("POST", "/reset_prefix_cache")[0] == 200
    infos = [client.ask("GET", "/server_info")[1] for client in (one, other)]
    assert infos[0] == infos[1]
    assert {"total", "engine weights"} <= infos[0]["startup_seconds"].keys()


def test_a_dead_front_loses_its_own_streams_only(server: Served) -> None:
    """And what it wrote in the background. Meanwhile the server is healthy for whoever comes, and what was counted
    stays counted. Who comes then goes to its successor, until that has as many connections."""
    server.idle()
    one, other = both(server)
    crowd = halves(server, 4)
    background = {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 900}
    # A stream of one letter each: nothing else could be right.
    ids = [one.ask("POST", "/tokenize", {"prompt": letter})[1]["tokens"][-1] for letter in "bc"]
    bodies = [{**ENDLESS, "allowed_token_ids": [id]} for id in ids]
    counted = server.metric("graphllm_http_requests_total")  # every process has told then what it has counted
    kept = f"{RESPONSES}/{one.ask('POST', RESPONSES, background)[1]['id']}"
    streams = [c.begin("POST", "/v1/completions", body) for c, body in zip((one, other), bodies, strict=True)]
    texts = [[next(news)] for news in map(events, streams)]
    statuses: list[int] = []
    done = threading.Event()

    def probe() -> None:
        while not done.wait(0.01):
            statuses.append(server.get("/health")[0])

    probing = threading.Thread(target=probe)
    os.kill(pids(server)[one.front], signal.SIGKILL)
    probing.start()
    try:
        for text, stream in zip(texts, streams, strict=True):
            text += events(stream)
        gone = {one.front, other.front}
        new = until(lambda: next((c for c in (Client(server) for _ in range(2)) if c.front not in gone), None))
    finally:
        done.set()
        probing.join()
    cut = "".join(texts[0])
    assert set(cut) == {"b"}  # an event may bring several letters
    assert len(cut) < ENDLESS["max_tokens"]
    assert "".join(texts[1]) == "c" * ENDLESS["max_tokens"] + "DONE"
    assert set(statuses) == {200}
    assert server.metric("graphllm_http_requests_total") >= counted
    assert {client.front for of in crowd for client in of} == gone
    until(lambda: {client.front for client in [Client(server) for _ in range(4)]} == {new.front})
    for client in (new, other):
        assert client.ask("POST", CHAT, SUM)[1]["choices"][0]["message"]["content"] == "12 + 7 = 19."
        status, failed = client.ask("POST", f"{kept}/cancel")
        assert (status, failed["status"], failed["error"]["code"]) == (200, "failed", "server_error")
    server.idle()  # what the dead one had in the engine is gone


def _large(size: int) -> tuple[bytes, bytes]:
    """A request with a body of so many bytes, that says nothing: what takes room of it, and the rest."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "stop": []}).encode()
    body = body[:-1] + b" " * (size - len(body)) + b"}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    data = f"{head}authorization: Bearer admin\r\ncontent-type: application/json\r\n\r\n".encode() + body
    return data[: 300 << 10], data[300 << 10 :]


def test_room_is_one_and_comes_back_from_the_dead(server: Served) -> None:
    """32 MiB of large bodies at a time, whoever reads them."""
    (one, next_to_one), (other, next_to_other) = halves(server, 2)
    begin, end = _large(24 << 20)
    turns = 0  # of its front, until a body is answered that need not wait
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(other.send, begin + end)
        while not other.answered:
            turns += next_to_other.ask("GET", "/version")[0] == 200
        sending.result()
        assert other.heard().startswith(b"HTTP/1.1 200")
        one.send(begin)
        for _ in range(50):  # it has its room then, and the controller knows
            next_to_one.ask("GET", "/version")
        assert next_to_one.metric("graphllm_engine_up") == 1
        sending = pool.submit(other.send, begin + end)
        for _ in range(3 * turns + 50):
            assert next_to_other.ask("GET", "/version")[0] == 200
        assert not other.answered
        os.kill(pids(server)[one.front], signal.SIGKILL)
        assert other.heard().startswith(b"HTTP/1.1 200")
        sending.result()
    again = Client(server)  # and all of it is there
    again.send(b"".join(_large(24 << 20)))
    assert again.heard().startswith(b"HTTP/1.1 200")


@pytest.mark.thorough
def test_a_front_that_is_held_up_gets_no_more(server: Served) -> None:
    """What waits for it is answered once it goes on; meanwhile others come to the other one, which has more."""
    one, other = both(server)
    address = server.url.removeprefix("http://")
    pid = pids(server)[one.front]
    os.kill(pid, signal.SIGSTOP)
    try:
        opened: list[http.client.HTTPConnection] = []

        def uneven() -> bool:
            opened.append(http.client.HTTPConnection(address, timeout=PATIENCE))
            opened[-1].request("GET", "/version")
            answered = select.select([connection.sock for connection in opened], [], [], 0)[0]
            return len(answered) > len(opened) - len(answered) + 4

        until(uneven)
        assert {Client(server).front for _ in range(3)} == {other.front}
    finally:
        os.kill(pid, signal.SIGCONT)
    assert {connection.getresponse().status for connection in opened} == {200}


def test_both_see_the_engine_die_and_come_back(server: Served) -> None:
    until(lambda: len(pids(server)) == 2)
    clients = both(server)
    streams = [client.begin("POST", "/v1/completions", ENDLESS) for client in clients]
    for stream in streams:
        assert stream.readline().startswith(b"data: {")
    os.kill(server.engine_pid, signal.SIGKILL)
    for stream in streams:
        assert b"signal 9" in stream.read()
    for client in clients:
        status, told = client.ask("GET", "/health")
        assert (status, told["status"]) in ((503, "dead"), (503, "restarting"))
        assert client.ask("POST", CHAT, SUM)[0] == 503
        assert client.ask("GET", "/health/live")[0] == 200
    server.wait_ready()
    for client in clients:
        assert client.ask("POST", CHAT, SUM)[1]["choices"][0]["message"]["content"] == "12 + 7 = 19."
    server.idle()


@pytest.mark.thorough
def test_what_runs_may_end_after_sigterm(server: Served) -> None:
    """The last of these tests: it ends the server."""
    clients = both(server)
    fronts = pids(server).values()
    streams = [client.begin("POST", "/v1/completions", ENDLESS) for client in clients]
    news = [events(stream) for stream in streams]
    for one in news:
        next(one)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: json.loads(server.get("/health")[1])["status"] == "draining")
    assert server.post("/v1/completions", {"prompt": "a"}, **ADMIN)[0] == 503
    assert [list(one)[-1] for one in news] == ["DONE", "DONE"]
    assert server.process.wait(PATIENCE) == 0
    assert not [pid for pid in fronts if Path(f"/proc/{pid}").exists()]


def test_a_server_that_cannot_start_says_why(embedded_artifact: Path, tmp_path: Path) -> None:
    for options, told in (
        (["--api-server-count", "0"], "api-server-count is 0: it must be at least 1 and at most 64"),
        (["--api-server-count", "2", "--artifact", str(tmp_path)], f"{tmp_path}"),
    ):
        command = [sys.executable, "-m", "graphllm.cli", "serve", "--port", "0", *options]
        found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert found.returncode == 2
        assert found.stderr.splitlines()[-1].startswith("graphllm: ")
        assert told in found.stderr.splitlines()[-1]


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_server(embedded_artifact: Path, tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    options = ("--artifact", embedded_artifact, "--api-server-count", 2)
    server = Served(tmp_path / "log", *options, environment=environment).wait_ready()
    processes = [server.engine_pid, *until(lambda: len(found := pids(server)) == 2 and found.values())]
    server.stop(signal.SIGKILL)
    until(lambda: gone(*processes))
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
