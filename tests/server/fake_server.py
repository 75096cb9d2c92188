"""A server that speaks the chat protocol from a script, for the tests of its clients: the page and `graphllm chat`."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Step = Mapping[str, Any] | bytes | threading.Event
"""A chunk of a stream; bytes as they are; or an event that the test sets to let the stream go on."""

CARD = {"id": "tiny-llama", "object": "model", "created": 1, "owned_by": "graphllm", "max_model_len": 4096,
        "root": "/models/tiny-llama"}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """An answer to one chat request. stream: the steps of a 200. body: that of any other status."""

    stream: Iterable[Step] = ()
    status: int = 200
    body: bytes = b""


@dataclass(frozen=True)
class Request:
    """What a client sent."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class State:
    """What the server does, for the test to change, and what it saw. files: more paths, as (headers, body)."""

    url: str = ""
    prefix: str = ""
    key: str | None = None
    ready: bool = True
    cause: str = ""
    models: list[dict[str, Any]] = field(default_factory=lambda: [dict(CARD)])
    files: dict[str, tuple[Mapping[str, str], bytes]] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client closed the connection before its answer's end."""
    close: Callable[[], None] = field(default=lambda: None)
    """Stops listening, now."""

    def chats(self) -> list[dict[str, Any]]:
        """The bodies of the chat requests that were let in."""
        return [r.body for r in self.requests if r.method == "POST" and self.allowed(r.headers)]

    def allowed(self, headers: Mapping[str, str]) -> bool:
        """Whether the request carries the key."""
        return self.key is None or headers.get("Authorization") == f"Bearer {self.key}"


def error(message: str, status: int, type: str = "invalid_request_error") -> Reply:
    """A refusal, in the protocol's form."""
    return Reply((), status, json.dumps({"error": {"message": message, "type": type}}).encode())


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """A chunk with these fields in its delta."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny-llama",
            "choices": [choice], "usage": None}  # fmt: skip


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The chunk with the figures, which comes last."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
              "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip
    return chunk() | {"choices": [], "usage": counts}


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    """A chunk of a tool call; with a name, its first one."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    first = {"id": f"call_{index}", "type": "function"} if name else {}
    return chunk(tool_calls=[{"index": index, "function": function, **first}])


def answer(text: str, *, finish: str = "stop", reasoning: str = "", prompt: int = 20, cached: int = 16) -> list[Step]:
    """A whole stream that says this, a word in a chunk."""
    words = [chunk(content=word) for word in _words(text)]
    thoughts = [chunk(reasoning_content=word, reasoning=word) for word in _words(reasoning)]
    begin = chunk(role="assistant", content="")
    return [begin, *thoughts, *words, chunk(finish), usage(prompt, len(words) + len(thoughts), cached), b"[DONE]"]


def _words(text: str) -> list[str]:
    first, *more = text.split(" ")
    return [first, *(f" {word}" for word in more)] if text else []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that leaves between two requests
            super().handle()

    def do_GET(self) -> None:
        state = self.state
        path = self._path(None)
        if path in state.files:
            headers, body = state.files[path]
            self._send(200, body, headers)
        elif path == "/health/ready":
            status, word = (200, "ok") if state.ready else (503, "starting")
            self._json(status, {"status": word, "cause": state.cause})
        elif path == "/version" and self._admitted():
            self._json(200, {"version": "1.2.3"})
        elif path == "/v1/models" and self._admitted():
            self._json(200, {"object": "list", "data": state.models})
        elif path not in ("/version", "/v1/models"):
            self._json(404, {"error": {"message": "Not Found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._path(body) != "/v1/chat/completions":
            self._json(404, {"error": {"message": "Not Found"}})
        elif self._admitted():
            reply = self.state.replies.pop(0)
            if reply.status == 200:
                self._stream(reply.stream)
            else:
                self._send(reply.status, reply.body, {"Content-Type": "application/json"})

    def _path(self, body: Any) -> str | None:
        """The path after the prefix, also noted; None when it is another."""
        self.state.requests.append(Request(self.command, self.path, self.headers, body))
        return self.path.removeprefix(self.state.prefix) if self.path.startswith(self.state.prefix) else None

    def _admitted(self) -> bool:
        if not self.state.allowed(self.headers):
            self._json(401, {"error": {"message": "this server needs an API key", "type": "authentication_error"}})
            return False
        return True

    def _stream(self, steps: Iterable[Step]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for step in steps:
                if isinstance(step, threading.Event):
                    self._wait(step)
                else:
                    self._write(step)
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionError:
            self.state.left.set()
            self.close_connection = True

    def _write(self, step: Mapping[str, Any] | bytes) -> None:
        if step == b"[DONE]":
            step = b"data: [DONE]\n\n"
        data = step if isinstance(step, bytes) else b"data: " + json.dumps(step, ensure_ascii=False).encode() + b"\n\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _wait(self, gate: threading.Event) -> None:
        self.connection.settimeout(0.01)
        try:
            while not gate.is_set():
                with suppress(TimeoutError):
                    if not self.connection.recv(1, socket.MSG_PEEK):
                        raise ConnectionResetError("the client left")
        finally:
            self.connection.settimeout(None)

    def _json(self, status: int, body: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(prefix: str = "") -> Iterator[State]:
    """A server on a free port of this machine, until the end of the block."""
    state = State(prefix=prefix)
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}{prefix}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def close() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    state.close = close
    try:
        yield state
    finally:
        close()
