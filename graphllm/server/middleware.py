"""What every HTTP request passes first: its id, the key, the size of its body; and its line in the log at the end.

A body is read here as a whole, so a route never sees half a request, and one that is too large or too slow ends here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import logging
import math
import re
import secrets
import time
from collections.abc import Sequence

import msgspec

from graphllm.config.server import AccessConfig
from graphllm.server.http.access import ADMIN_PATHS
from graphllm.server.http.connection import LINGER_SECONDS
from graphllm.server.http.errors import error_response
from graphllm.server.http.wire import App, Message, Receive, Record, Scope, Send, record_of
from graphllm.server.service.shared_state import Shared, SharedRoom
from graphllm.server.supervision.metrics import Metrics

_PROBES = frozenset({"/health", "/health/startup", "/health/live", "/health/ready", "/ready", "/ping"})
# Probes of an orchestrator have no key, and the pages, which hold nothing of anybody, are where a person types it in.
OPEN_PATHS = _PROBES | {"/", "/docs", "/docs/oauth2-redirect", "/openapi.json"}
_OPEN_FOLDERS = ("/static-offline-docs/", "/page/")  # style and script of /docs, files of the chat page
_QUIET = _PROBES | {"/metrics"}  # asked every few seconds: logged at debug
_ID = re.compile(rb"[\w.:/+=-]{1,128}")
_BODY_SECONDS = 60.0  # for a whole body
_ROOM_SECONDS = 30.0  # that it may wait for room
_SMALL = 256 << 10  # bytes of a body that needs none
_VALUE = 80  # bytes that a number or a short text of a body becomes
_log = logging.getLogger("graphllm.access")
_failures = logging.getLogger(__name__)


class Middleware:
    """ASGI middleware. access: who may. max_body: bytes."""

    def __init__(self, app: App, access: AccessConfig, max_body: int, metrics: Metrics, shared: Shared) -> None:
        self._app, self._max_body, self._metrics, self._shared = app, max_body, metrics, shared
        self._keys, self._admins = (
            [_digest(key.encode()) for key in keys] for keys in (access.api_key, access.admin_api_key)
        )
        self._root, self._quiet = access.root_path, _QUIET.union(access.disable_access_log_for_endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # as GET, everywhere; what writes the answer leaves its body out
            scope = {**scope, "method": "GET"}
        if self._root:
            path = scope["path"]
            inside = path.startswith(self._root + "/")  # of proxies that leave it there
            scope = {**scope, "root_path": self._root, "path": path.removeprefix(self._root) if inside else path}
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        named = _ID.fullmatch(given) is not None
        record = scope["graphllm"] = Record(
            given.decode() if named else secrets.token_hex(16),
            named,
            headers.get(b"traceparent", b"").decode("latin-1"),
        )
        began, status = time.perf_counter(), 499  # nobody was there to hear the answer
        whole = False  # the answer, on the server's side

        async def sent(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                id = record.id.encode()  # under the name that OpenAI's clients read, and Anthropic's
                more = [(name.encode(), value.encode()) for name, value in record.headers.items()]
                message["headers"] = [*message["headers"], (b"x-request-id", id), (b"request-id", id), *more]
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        self._metrics.http_begins()
        try:
            await self._pass(scope, headers, receive, sent)
        except Exception as error:
            status = 500
            if not whole:
                raise
            # uvicorn would log it and close the connection, on which the client's next request may be under way.
            _failures.error("request %s failed", record.id, exc_info=error)
        finally:
            record.held.close()
            if status >= 400 and record.size > _SMALL:
                gc.collect()  # exceptions and their frames hold each other, and what was made of the body
            self._tell(scope, method, record, status, time.perf_counter() - began)

    async def _pass(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        path = scope["path"]
        refusal = await self._refusal(scope, path, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._body(headers, receive, record_of(scope)), _BODY_SECONDS)
        except TimeoutError:
            message = f"body: not complete after {_BODY_SECONDS:.0f} s"
            await _refuse(error_response(scope, 408, message, headers={"Connection": "close"}), scope, receive, send)
            return
        except _TooLargeError:
            message = f"body: larger than {self._max_body} bytes; shorten it, or start with a larger --max-body-size"
            await _refuse(error_response(scope, 413, message, headers={"Connection": "close"}), scope, receive, send)
            return
        except _NoRoomError:
            message = "body: other large bodies leave no room for it; send it again later"
            later = {"Connection": "close", "Retry-After": f"{_ROOM_SECONDS:.0f}"}
            await _refuse(error_response(scope, 503, message, headers=later), scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay([body], receive), send)

    async def _refusal(self, scope: Scope, path: str, headers: dict[bytes, bytes]) -> App | None:
        """The answer to who may not ask, or not so often."""
        if path in OPEN_PATHS or path.startswith(_OPEN_FOLDERS):
            return None
        key = _key(headers)
        admin = _is_one(key, self._admins)
        if path in ADMIN_PATHS:
            if admin:
                return None
            what = "wrong, or not an admin's" if self._admins else "the server was started without --admin-api-key"
            return error_response(scope, 403, f"api key: {what}; {path} needs the key of --admin-api-key")
        if self._keys and not (admin or _is_one(key, self._keys)):
            message = "api key: missing or wrong; send the header Authorization: Bearer KEY"
            return error_response(scope, 401, message, headers={"WWW-Authenticate": "Bearer"})
        if self._shared.rate is None or admin or scope["method"] != "POST":
            return None
        client = scope.get("client")
        seconds = await self._shared.rate.take(key.hex() if self._keys else client[0] if client else "local")
        if not seconds:
            return None
        self._metrics.rejected("rate_limit")
        later = {"Retry-After": str(math.ceil(seconds))}
        message = f"too many requests: send the next one in {math.ceil(seconds)} s"
        return error_response(scope, 429, message, headers=later)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, record: Record) -> bytearray | None:
        """None when the client left before its end."""
        declared = headers.get(b"content-length", b"")
        length = int(declared) if declared.isdigit() else self._max_body
        if declared and length > self._max_body:
            raise _TooLargeError
        body, more, known = bytearray(), True, False
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_body:
                raise _TooLargeError
            if len(body) > _SMALL and not known:
                await _taken(self._shared.bodies, length, record)
                known = True
            more = message.get("more_body", False)
        if known:
            await _taken(self._shared.values, _VALUE * sum(map(body.count, b",:[{")), record)
        return body

    def _tell(self, scope: Scope, method: str, record: Record, status: int, seconds: float) -> None:
        path = scope["path"]
        route = getattr(scope.get("route"), "path", None)
        self._metrics.http(route or "none", status, seconds)
        level = logging.DEBUG if path in self._quiet else logging.INFO
        if _log.isEnabledFor(level):
            client = scope.get("client")
            notes = {"id": record.id, "client": client[0] if client else "local", "ms": round(1000 * seconds, 1)}
            # A path is whatever somebody sent.
            line = f"{method} {msgspec.json.encode(path[:200]).decode()[1:-1]} {status}"
            _log.log(level, line, extra={"notes": {**notes, **record.notes}})


class _TooLargeError(Exception):
    pass


class _NoRoomError(Exception):
    pass


async def _taken(room: SharedRoom, size: int, record: Record) -> None:
    try:
        await asyncio.wait_for(room.take(size, record.held), _ROOM_SECONDS)
    except TimeoutError:
        raise _NoRoomError from None


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
        await asyncio.wait_for(drain(), LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b""})


def _key(headers: dict[bytes, bytes]) -> bytes:
    """The digest of the key that a request brings."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        given = headers.get(b"x-api-key", b"")
    return _digest(given.strip())


def _is_one(digest: bytes, keys: Sequence[bytes]) -> bool:
    """All of them are compared, whole: the time says nothing about the keys."""
    return sum(hmac.compare_digest(digest, key) for key in keys) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _replay(body: list[bytearray], receive: Receive) -> Receive:
    """The body that was read, which is not kept here, then what comes after it: the end of the connection."""

    async def replayed() -> Message:
        if not body:
            return await receive()
        return {"type": "http.request", "body": bytes(body.pop()), "more_body": False}

    return replayed
