"""Router: an ASGI application that has one server compute a prompt, and another one go on with it.

What the other one says is passed on as it comes. When no server for prompts answers, the other one computes the prompt
itself. When a client leaves, the connections to both servers end, which ends their work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from graphllm.chat.call import CHAT, COMPLETIONS
from graphllm.chat.error_bodies import error_body
from graphllm.config.vllm.kv_transfer import PARAMS
from graphllm.server.http.wire import Receive, Scope, Send, cancelled, encode, read_json, until_gone
from graphllm.server.router.prefill import decode_body, prefill_body
from graphllm.server.router.upstream import Answer, Headers, Upstream, UpstreamError

_log = logging.getLogger(__name__)
_PAUSE = 2.0  # seconds between two looks at each server
_SERVER = "server_error"


class Router:
    """prefill, decode: the servers, of which those with the fewest requests are asked. max_body: bytes."""

    def __init__(self, prefill: Sequence[Upstream], decode: Sequence[Upstream], max_body: int) -> None:
        self.prefill, self.decode, self._max_body = prefill, decode, max_body

    async def watch(self) -> None:
        """Look at all servers again and again, until this is cancelled."""
        while True:
            await asyncio.gather(*(server.look() for server in (*self.prefill, *self.decode)))
            await asyncio.sleep(_PAUSE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if scope["method"] == "GET" and path in ("/health", "/health/ready", "/health/live", "/ready", "/ping"):
            await self._health(send)
            return
        body = await self._read(receive)
        if body is None:
            await _respond(send, 413, error_body(f"body: larger than {self._max_body} bytes; shorten it"))
            return
        headers = list(scope["headers"])
        if not any(name == b"x-request-id" for name, _ in headers):  # both servers log the request by one name
            headers.append((b"x-request-id", secrets.token_hex(16).encode()))
        answering = asyncio.ensure_future(self._answer(scope, headers, body, send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            await cancelled(answering, gone)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body of a request; None for one that is too large."""
        pieces, size = list[bytes](), 0
        while True:
            message = await receive()
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self._max_body:
                return None
            if not message.get("more_body", False):
                return b"".join(pieces)

    async def _health(self, send: Send) -> None:
        """200 while a server is there that answers; the others are named."""
        down = [server.url for server in (*self.prefill, *self.decode) if server.down.is_set()]
        ready = not all(server.down.is_set() for server in self.decode)
        status = "dead" if not ready else "degraded" if down else "ready"
        cause = {"cause": f"no answer from {', '.join(down)}"} if down else {}
        await _respond(send, 200 if ready else 503, {"status": status, **cause})

    async def _answer(self, scope: Scope, headers: Headers, body: bytes, send: Send) -> None:
        path, method = scope["raw_path"] or scope["path"].encode(), scope["method"].encode()
        if scope["query_string"]:
            path += b"?" + scope["query_string"]
        if method == b"POST" and scope["path"] in (CHAT, COMPLETIONS):
            refusal, body = await self._prefilled(path, headers, body)
            if refusal is not None:
                await _pass(refusal[0], refusal[1], send)
                return
        async with self._served(self.decode, method, path, headers, body) as answer:
            if answer is None:
                message = "no server that goes on with prompts answers; send the request again later"
                await _respond(send, 503, error_body(message, type=_SERVER), [(b"retry-after", b"2")])
                return
            await _forward(answer, send)

    async def _prefilled(self, path: bytes, headers: Headers, body: bytes) -> tuple[tuple[Answer, bytes] | None, bytes]:
        """Have the prompt of a request computed. The answer of a server that refuses it, and the body for the server
        that goes on."""
        try:
            given: Any = read_json(body)
        except ValueError:
            return None, body  # the server that goes on says what is wrong
        asked = prefill_body(given) if isinstance(given, dict) else None
        if asked is None:
            return None, body
        async with self._served(self.prefill, b"POST", path, headers, encode(asked), busy_is_down=True) as answer:
            if answer is None:
                return None, body
            try:
                said = await answer.body()
                if 400 <= answer.status < 500:
                    return (answer, said), body
                found = read_json(said)
            except (UpstreamError, ValueError) as failure:
                _log.warning("a prompt is computed where it goes on: %s", failure)
                return None, body
        return None, encode(decode_body(given, found.get(PARAMS) if isinstance(found, dict) else None))

    @contextlib.asynccontextmanager
    async def _served(
        self, servers: Sequence[Upstream], method: bytes, path: bytes, headers: Headers, body: bytes,
        busy_is_down: bool = False,
    ) -> AsyncGenerator[Answer | None, None]:  # fmt: skip
        """The answer of a server, the least loaded first; None where none answers. busy_is_down: also one that has no
        room, or fails, is passed by."""
        for server in sorted(servers, key=_load):
            if server.down.is_set():
                continue
            server.in_flight += 1
            server.asked += 1
            answer: Answer | None = None
            try:
                try:
                    answer = await _while_up(server, method, path, headers, body)
                except UpstreamError as failure:
                    _log.warning("%s: %s", server.url, failure)
                    server.down.set()  # until it is looked at again
                    continue
                if busy_is_down and (answer.status == 429 or answer.status >= 500):
                    continue
                yield answer
                return
            finally:
                server.in_flight -= 1
                if answer is not None:
                    answer.close()
        yield None


def _load(server: Upstream) -> tuple[int, int]:
    return server.in_flight, server.asked  # in turn, where both have as much to do


async def _while_up(server: Upstream, method: bytes, path: bytes, headers: Headers, body: bytes) -> Answer:
    """Ask, but wait no longer than the server seems to live."""
    asking = asyncio.ensure_future(server.ask(method, path, headers, body))
    down = asyncio.ensure_future(server.down.wait())
    try:
        await asyncio.wait((asking, down), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise UpstreamError("it does not answer any more")
        return asking.result()
    finally:
        await cancelled(down)
        if not asking.done():
            await cancelled(asking)


async def _forward(answer: Answer, send: Send) -> None:
    """Pass an answer on as it comes."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    streamed = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in answer.headers)
    try:
        async for chunk in answer.chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except UpstreamError as failure:
        if not streamed:
            raise
        end = b"data: " + encode(
            error_body(f"the server has ended in the middle of its answer: {failure}", type=_SERVER)
        )
        await send({"type": "http.response.body", "body": b"\n\n" + end + b"\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _pass(answer: Answer, body: bytes, send: Send) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _respond(send: Send, status: int, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    data = encode(body)
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": data, "more_body": False})
