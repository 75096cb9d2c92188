"""Bodies on the wire: JSON that is read strictly, JSON and server-sent events that are written fast; and what is known
of one request from its first byte to its line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")
App = Callable[[Scope, Receive, Send], Awaitable[None]]

encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_MAX_DEPTH = 128  # levels; a schema may have 100
_MAX_CONTAINERS = 1 << 18  # lists and objects: one of three bytes takes a hundred times as much memory
# The next list or object with what stands before it, strings as a whole; or the text after the last one.
_CONTAINER = re.compile(rb'(?:[^"\[{]++|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z))*+(?:[\[{]|\Z)', re.DOTALL)
LONG = 16 << 10  # bytes of a body from which a thread reads and checks it; other requests get their tokens in that time
_VERY_LONG = 1 << 20  # these take turns: many threads that each hold the interpreter for long would stop the event loop
_very_long = ThreadPoolExecutor(1, "very-long-bodies")


@dataclass
class Record:
    """What a route adds to the log line of its request, and what errors are made of. id: as the client calls it,
    which another one may do, too; named: in a header. traceparent: the header of that name. body: of JSON, once it
    is read; size: its bytes. headers: more of the answer. held: the room that its body takes; closed once there are
    tokens."""

    id: str
    named: bool = False
    traceparent: str = ""
    body: Any = None
    size: int = 0
    notes: dict[str, object] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def record_of(scope: Scope) -> Record:
    """Of a request that came through the middleware."""
    return scope["graphllm"]


class JsonRoute(APIRoute):
    """A route that reads JSON bodies by the rules of `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        record, data = record_of(self.scope), await self.body()
        record.size = len(data)
        self._body = b""  # the route lives as long as its answer takes
        record.body = await aside(record, read_json, data)
        return record.body


async def aside(record: Record, work: Callable[..., T], *args: Any) -> T:
    """What ``work`` returns; in a thread for the long body of a request."""
    if record.size <= LONG:
        return work(*args)
    executor = _very_long if record.size > _VERY_LONG else None
    return await asyncio.get_running_loop().run_in_executor(executor, work, *args)


def read_json(data: bytes) -> Any:
    """Neither NaN nor half a surrogate pair, which no tokenizer takes, nor nesting that others cannot follow, nor more
    lists and objects than anybody needs. Raises json.JSONDecodeError."""
    # Exactly, where it may be: texts have brackets, too.
    many = data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS
    if many and any(number >= _MAX_CONTAINERS for number, _ in enumerate(_CONTAINER.finditer(data))):
        raise json.JSONDecodeError(f"more than {_MAX_CONTAINERS} lists and objects", "", 0)
    try:
        value = _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as damage:
        raise json.JSONDecodeError(str(damage), "", 0) from damage
    level, depth = [value], 0
    while level:
        if depth > _MAX_DEPTH:
            raise json.JSONDecodeError(f"nested deeper than {_MAX_DEPTH} levels", "", 0)
        level, depth = [c for v in level for c in _children(v)], depth + 1
    return value


def _children(value: Any) -> Iterable[Any]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in found if isinstance(child, (dict, list))]


def json_response(body: Any, status: int = 200) -> Response:
    """A body of plain JSON values."""
    return Response(encode(body), status, media_type="application/json")


def event(body: Any) -> bytes:
    """One server-sent event; bodies that have a type of their own name it, as the newer APIs do."""
    return b"data: " + encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """A server-sent event of the APIs with types of events."""
    return b"event: " + body["type"].encode() + b"\ndata: " + encode(body) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class GoneError(Exception):
    """The client has closed the connection; nobody hears the answer."""


async def while_there(request: Request, work: Awaitable[Any]) -> Any:
    """What ``work`` returns; it is cancelled, and GoneError raised, when the client leaves before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        await cancelled(task, gone)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """End them, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. When the client leaves, the generator is closed at once, which aborts what it waits for.
    interval: seconds without an event after which ``sign`` is sent, so that proxies between do not give up; 0: never.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], interval: float, sign: bytes = b": keep-alive\n\n") -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._interval, self._sign = events, interval, sign
        self._idle_since: float | None = None  # None: something is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(until_gone(receive))
        living = asyncio.ensure_future(self._show_life(send))
        try:
            await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await cancelled(writing, gone, living)

    async def _show_life(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while self._interval:
            idle = 0.0 if self._idle_since is None else clock() - self._idle_since
            if idle < self._interval:
                await asyncio.sleep(self._interval - idle)
            else:
                self._idle_since = clock()
                await send({"type": "http.response.body", "body": self._sign, "more_body": True})

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            clock = asyncio.get_running_loop().time
            self._idle_since = clock()
            async for data in events:
                self._idle_since = None
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._idle_since = clock()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
