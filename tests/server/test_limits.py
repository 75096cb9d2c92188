"""What the server lets nobody take: memory, the time of others, endless patience; and what it tells instead."""

from __future__ import annotations

import json
import re
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.hostile import large_bodies
from tests.server.live import Served
from tests.waiting import PATIENCE, until

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
MIB = 1 << 20


def memory(server: Served, field: str = "VmRSS") -> int:
    """MiB of the process that speaks HTTP. field: VmHWM is the most since `forget_peak`."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", status)[1]) // 1024  # type: ignore[index]


def forget_peak(server: Served) -> None:
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")


@contextmanager
def chats(server: Served) -> Iterator[list[str]]:
    """Meanwhile somebody chats; the answers so far."""
    answers: list[str] = []
    done = threading.Event()
    body = {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 4}

    def chat() -> None:
        while not done.wait(0.05):
            status, answer, _ = server.post(CHAT, body)
            assert status == 200, answer
            answers.append(answer["choices"][0]["message"]["content"])

    asking = threading.Thread(target=chat)
    asking.start()
    try:
        yield answers
    finally:
        done.set()
        asking.join()


def raw(server: Served, data: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with server.connect() as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


# --- texts


def test_texts_far_over_the_context(served: Served) -> None:
    """Refused by their characters, before they are tokenized and in no memory, by every route that tokenizes."""
    text = "hello world, some words " * 350_000  # 8.4 MB
    turn = {"role": "user", "content": text}
    forget_peak(served)
    before = memory(served)
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": ["x", text], "echo": True}),
        (CHAT, {"messages": [turn]}),
        (CHAT, {"messages": [turn], "stream": True}),
        (RESPONSES, {"input": text}),
        (MESSAGES, {"messages": [turn], "max_tokens": 2}),
        (f"{MESSAGES}/count_tokens", {"messages": [turn]}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [turn]}),
    ):
        status, answer, _ = served.post(path, body)
        assert status == 400, path
        assert re.search(r"prompt has 8\d{6} characters, which are at least \d+ tokens", answer["error"]["message"])
        if "param" in answer["error"]:
            assert answer["error"]["param"] in body
    assert memory(served, "VmHWM") - before < 150  # they were read, after all


def test_a_text_over_the_context_can_be_counted(served: Served) -> None:
    text = "hello world, " * 5_000
    status, answer, _ = served.post("/tokenize", {"prompt": text})
    assert (status, answer["count"] > 10 * answer["max_model_len"]) == (200, True)


@pytest.mark.parametrize("words", [["word"] * 1025, ["x" * 40_000] * 2])
def test_too_many_bad_words(served: Served, words: list[str]) -> None:
    status, answer, _ = served.post(COMPLETIONS, {"prompt": "x", "bad_words": words})
    assert (status, answer["error"]["param"]) == (400, "bad_words")
    assert "give at most 1024" in answer["error"]["message"]


@pytest.mark.thorough
def test_a_body_of_a_thousand_prompts(served: Served) -> None:
    """Others come between them, in the tokenizer and in the engine's queue."""
    with chats(served) as chatted:
        status, answer, _ = served.post(COMPLETIONS, {"prompt": ["hello world, words " * 200] * 1000, "max_tokens": 1})
        assert len(chatted) > 2
    assert status == 200
    assert len(answer["choices"]) == 1000


# --- the heads of requests


def test_hosts_and_headers(served: Served) -> None:
    many = b"".join(b"x: y\r\n" for _ in range(10_000))
    chunked = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    for head, status in (
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n" + many + b"\r\n", b"431"),
        (chunked + many + b"\r\n", b"431"),  # trailers
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n", b"200"),
    ):
        answer = raw(served, head)  # and the connection is closed
        assert answer.split(b" ", 2)[1] == status, head[:80]
        if status != b"200":
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith("host" if status == b"400" else "headers")
    assert served.get("/health")[0] == 200


def test_a_client_who_still_sends_reads_its_refusal(served: Served) -> None:
    """It is not reset before, and another request behind it is not answered."""
    for headers, status in (
        ("host: x\r\nx: " + "x" * 70_000, b"431"),
        ("host: x\r\ntransfer-encoding: chunked\r\n\r\nno\r\n", b"400"),
        ("x: y\r\n\r\n", b"400"),
    ):
        with served.connect() as connection:
            connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\n{headers}".encode())
            select.select([connection], [], [], PATIENCE)  # the answer is there
            for _ in range(50):
                connection.sendall(b"x" * 20_000 + b"\r\nGET /health HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert (answer.split(b" ", 2)[1], answer.count(b"content-type")) == (status, 1)
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert served.get("/health")[0] == 200


def test_who_sends_for_ever_after_a_refusal_is_reset(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        select.select([connection], [], [], PATIENCE)  # the answer is there

        def reset() -> bool:
            try:
                connection.sendall(b"x")
            except OSError:
                return True
            return False

        until(reset)


def test_no_refusal_in_place_of_another_answer(served: Served) -> None:
    """Two requests wait for their answers when what follows is no HTTP: the connection ends, without any."""
    body = json.dumps({"prompt": "Count:", "max_tokens": 500, "ignore_eos": True})
    first = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    second = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    assert raw(served, f"{first}\r\n\r\n{body}{second}nothing\r\n\r\n".encode()) == b""
    served.idle()


def test_head(served: Served) -> None:
    """As GET without a body, wherever there is GET: load balancers ask so."""
    for path in ("/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/version", "/", "/docs"):
        found, whole = httpx.head(served.url + path), httpx.get(served.url + path)
        assert (found.status_code, found.content) == (200, b""), path
        assert found.headers["content-length"] == whole.headers["content-length"]
    assert httpx.head(served.url + CHAT).headers["allow"] == "POST"
    assert "HEAD" in httpx.post(served.url + "/version").headers["allow"]


# --- what is told


def test_no_folder_is_told(served: Served, embedded_artifact: Path) -> None:
    """Of the machine on which the model lies."""
    from graphllm.embedded import MODEL_DIR

    texts = [
        *(served.get(path)[1] for path in ("/v1/models", "/metrics", "/health", "/version", "/openapi.json", "/load")),
        served.get("/v1/models/graphllm-embedded")[1],
        *(json.dumps(served.post(path, {})[1]) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize")),
    ]
    for text in texts:
        assert str(MODEL_DIR) not in text
        assert str(MODEL_DIR.parent) not in text
        assert str(embedded_artifact) not in text
    assert json.loads(texts[0])["data"][0]["root"] == "graphllm-embedded"


def test_clamped_max_tokens_are_told(served: Served) -> None:
    prompt = "hello world, " * 200
    length = served.post("/tokenize", {"prompt": prompt})[1]["count"]
    for stream in (False, True):
        body = {"prompt": prompt, "max_tokens": 5000, "stop": ["e"], "stream": stream}
        with httpx.stream("POST", served.url + COMPLETIONS, json=body, timeout=PATIENCE) as answer:
            answer.read()
            assert answer.headers["x-max-tokens-clamped"] == str(1024 - length)
    fitting = served.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 9})
    assert "x-max-tokens-clamped" not in {name.lower() for name in fitting[2]}


# --- the docs, with a key; signs of life


def test_docs_with_a_key_and_signs_of_life(serve: Callable[..., Served]) -> None:
    """One server for both, to save a start."""
    server = serve("--api-key", "key", "--sse-keep-alive-interval", 0.1, "--max-num-seqs", 64)
    server.wait_ready()
    page = server.get("/docs")
    assert page[0] == 200
    for asset in re.findall(r'(?:src|href)="(/[^"]+)"', page[1]):
        assert httpx.get(server.url + asset).status_code == 200, asset
    status, text = server.get("/openapi.json")
    document = json.loads(text)
    scheme = next(iter(document["components"]["securitySchemes"].items()))
    assert (status, scheme[1]) == (200, {"type": "http", "scheme": "bearer"})
    assert document["paths"][CHAT]["post"]["security"] == [{scheme[0]: []}]
    assert server.get("/version")[0] == 401

    import anthropic
    import openai

    blocker = {"prompt": "x", "n": 64, "temperature": 1, "max_tokens": 900, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer key"}
    with (
        ThreadPoolExecutor(2) as pool,
        httpx.stream("POST", server.url + COMPLETIONS, json=blocker, headers=headers, timeout=PATIENCE),
    ):
        # All places are taken then, and what comes waits in the queue.
        server.wait(lambda: server.metric("graphllm_requests_running", **headers) == 64)
        turn = [{"role": "user", "content": "Hi"}]
        short: dict[str, Any] = {"messages": turn, "max_tokens": 2, "stream": True}
        for path, body, sign in (
            (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stream": True}, b": keep-alive\n\n"),
            (RESPONSES, {"input": "x", "max_output_tokens": 16, "stream": True}, b": keep-alive\n\n"),
            (MESSAGES, short, b'event: ping\ndata: {"type":"ping"}\n\n'),
        ):
            with httpx.stream("POST", server.url + path, json=body, headers=headers, timeout=PATIENCE) as answer:
                assert answer.status_code == 200
                assert next(answer.iter_bytes()) == sign
        claude = anthropic.Anthropic(base_url=server.url, api_key="key")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key")
        model = "graphllm-embedded"  # real clients read over the signs
        first = pool.submit(
            lambda: list(client.chat.completions.create(model=model, messages=turn, max_tokens=2, stream=True))
        )

        def message() -> Any:
            with claude.messages.stream(model=model, messages=turn, max_tokens=2) as stream:
                return stream.get_final_message()

        second = pool.submit(message)
        server.wait(lambda: server.metric("graphllm_requests_waiting", **headers) == 2)
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, headers=headers, timeout=PATIENCE) as answer:
            signs = answer.iter_bytes()
            assert [next(signs) for _ in range(5)] == [b": keep-alive\n\n"] * 5  # the others have got as many
        assert not first.done()
        assert not second.done()
    assert first.result()[-1].choices[0].finish_reason == "length"
    assert second.result().stop_reason == "max_tokens"


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "cert.pem", folder / "key.pem"


def test_tls(serve: Callable[..., Served], certificate: tuple[Path, Path]) -> None:
    """With certificates of clients, too."""
    cert, key = certificate
    server = serve("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", cert, "--ssl-cert-reqs", 2)
    assert server.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(cert))
    with pytest.raises(httpx.TransportError), httpx.Client(verify=trusting) as client:
        client.get(server.url + "/health/live")  # without one
    trusting.load_cert_chain(cert, key)
    with httpx.Client(verify=trusting, base_url=server.url, timeout=PATIENCE) as client:
        server.wait(lambda: client.get("/health/ready").status_code == 200)
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
    assert server.stop() == 0


def test_mistakes_with_certificates(cli: Any, certificate: tuple[Path, Path], tmp_path: Path, cache: Path) -> None:
    """They are told before anything is compiled."""
    cert, key = certificate
    (tmp_path / "not.pem").write_text("nothing")
    (tmp_path / "locked.pem").write_bytes(
        subprocess.run(
            ["openssl", "rsa", "-aes128", "-passout", "pass:x", "-in", key], check=True, capture_output=True
        ).stdout
    )
    for options, named in (
        (["--ssl-certfile", tmp_path / "none.pem"], "ssl-certfile is"),
        (["--ssl-certfile", tmp_path], "ssl-certfile is"),
        (["--ssl-certfile", tmp_path / "not.pem"], "ssl-certfile is"),
        (["--ssl-certfile", cert], "ssl-certfile is"),  # its key is elsewhere
        (["--ssl-certfile", cert, "--ssl-keyfile", tmp_path / "none.pem"], "ssl-keyfile is"),
        (["--ssl-certfile", cert, "--ssl-keyfile", tmp_path / "locked.pem"], "without a password"),
        (["--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", tmp_path / "not.pem"], "ssl-ca-certs is"),
        (["--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-cert-reqs", 2], "ssl-cert-reqs is 2"),
        (["--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-cert-reqs", 7], "ssl-cert-reqs is 7"),
        (["--ssl-keyfile", key], "only with --ssl-certfile"),
    ):
        done = cli("serve", "--port", 0, *options)
        assert (done.code, named in done.err, "Traceback" in done.err) == (2, True, False), done.err
    assert not cache.exists()


# --- for long


def _status(request: tuple[Served, str, bytes]) -> int:
    server, path, data = request
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + path, content=data, headers=headers, timeout=PATIENCE).status_code


@pytest.mark.slow
def test_hostile_bodies_of_many(serve: Callable[..., Served]) -> None:
    """200 MB from 20 connections at once, of each kind: little memory, and others are answered meanwhile."""
    server = serve().wait_ready()
    engine = server.engine_pid
    for name, body in large_bodies(10 * MIB).items():
        forget_peak(server)
        with chats(server) as chatted, ThreadPoolExecutor(20) as pool:
            statuses = set(pool.map(_status, [(server, *body)] * 20))
            answers = len(chatted)
        most = memory(server, "VmHWM")
        print(f"{name}: {sorted(statuses)}, {most} MiB, {answers} chats meanwhile")
        assert statuses <= {400, 413, 503}
        assert most < 400, name
        assert answers > 2, name
    assert server.engine_pid == engine
    assert server.stop() == 0


@pytest.mark.slow
def test_readers_who_stop(serve: Callable[..., Served]) -> None:
    """50 of them, of long streams: little memory, and after a minute they are gone and what they took is free."""
    server = serve().wait_ready()
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})
    before = memory(server)

    def load() -> int:
        return int(json.loads(server.get("/load")[1])["server_load"])

    host, port = server.url.removeprefix("http://").split(":")
    body = {"prompt": "Count:", "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 20}
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connections = []
    for _ in range(50):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"{head}\r\n\r\n".encode() + data)
        connections.append(connection)
    forget_peak(server)
    with chats(server) as chatted:
        server.wait(lambda: load() >= 50)
        server.idle()  # they are done for the engine
        server.wait(lambda: load() <= 2)
        assert len(chatted) > 2
    print(f"{before} MiB, {memory(server, 'VmHWM')} at most, {memory(server)} after")
    assert memory(server, "VmHWM") - before < 120
    for connection in connections:
        connection.close()
    assert server.stop() == 0
