"""What every HTTP request passes first: its id, the key, the size of its body; and its line in the log at the end.

A body is read here as a whole, so a route never sees half a request, and one that is too large or too slow ends here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence

import msgspec

from graphllm.server.http.errors import error_response
from graphllm.server.http.wire import App, Message, Receive, Record, Scope, Send
from graphllm.server.operations.metrics import Metrics

# Probes of an orchestrator have no key, and the page, which holds nothing of anybody, is where a person types it in.
OPEN_PATHS = frozenset({"/", "/health", "/health/startup", "/health/live", "/health/ready", "/ping"})
_QUIET = OPEN_PATHS - {"/"} | {"/metrics"}  # asked every few seconds: logged at debug
_ID = re.compile(rb"[\w.:/+=-]{1,128}")
_BODY_SECONDS = 60.0  # for a whole body
_LINGER_SECONDS = 2.0  # for what a client still sends of a body that was refused
_log = logging.getLogger("graphllm.access")


class Middleware:
    """ASGI middleware. keys: any of them opens; none: everything is open. max_body: bytes."""

    def __init__(self, app: App, keys: Sequence[str], max_body: int, metrics: Metrics) -> None:
        self._app, self._max_body, self._metrics = app, max_body, metrics
        self._keys = [_digest(key.encode()) for key in keys]
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        record = scope["graphllm"] = Record(given.decode() if _ID.fullmatch(given) else secrets.token_hex(16))
        began, status = time.perf_counter(), 499  # nobody was there to hear the answer

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                id = record.id.encode()  # under the name that OpenAI's clients read, and Anthropic's
                message["headers"] = [*message["headers"], (b"x-request-id", id), (b"request-id", id)]
            await send(message)

        self.in_flight += 1
        self._metrics.http_begins()
        try:
            await self._pass(scope, headers, receive, sent)
        except Exception:
            status = 500
            raise
        finally:
            self.in_flight -= 1
            self._tell(scope, record, status, time.perf_counter() - began)

    async def _pass(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        if self._keys and scope["path"] not in OPEN_PATHS and not self._knows(headers):
            message = "api key: missing or wrong; send the header Authorization: Bearer KEY"
            await error_response(scope, 401, message, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._body(headers, receive), _BODY_SECONDS)
        except TimeoutError:
            message = f"body: not complete after {_BODY_SECONDS:.0f} s"
            await error_response(scope, 408, message, headers={"Connection": "close"})(scope, receive, send)
            return
        except _TooLargeError:
            message = f"body: larger than {self._max_body} bytes; shorten it, or start with a larger --max-body-size"
            await _refuse(error_response(scope, 413, message, headers={"Connection": "close"}), scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        digest = _digest(given.strip())
        # All of them are compared, whole: the time says nothing about the keys.
        return sum(hmac.compare_digest(digest, key) for key in self._keys) > 0

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """None when the client left before its end."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise _TooLargeError
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise _TooLargeError
            if not message.get("more_body", False):
                return b"".join(parts)

    def _tell(self, scope: Scope, record: Record, status: int, seconds: float) -> None:
        path = scope["path"]
        route = getattr(scope.get("route"), "path", None)
        self._metrics.http(route or "none", status, seconds)
        level = logging.DEBUG if path in _QUIET else logging.INFO
        if _log.isEnabledFor(level):
            client = scope.get("client")
            notes = {"id": record.id, "client": client[0] if client else "local", "ms": round(1000 * seconds, 1)}
            # A path is whatever somebody sent.
            line = f"{scope['method']} {msgspec.json.encode(path[:200]).decode()[1:-1]} {status}"
            _log.log(level, line, extra={"notes": {**notes, **record.notes}})


class _TooLargeError(Exception):
    pass


async def _refuse(response: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer before the end of a body, and throw away what still comes of it: a connection that is closed on a client
    who sends is reset, and with it the answer on its way."""

    async def unfinished(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    async def drain() -> None:
        while (await receive()).get("more_body"):
            pass

    await response(scope, receive, unfinished)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(drain(), _LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b""})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then what comes after it: the end of the connection."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
