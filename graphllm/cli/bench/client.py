"""An HTTP/1.1 client for load tests: keep-alive connections on one asyncio loop, and streamed completions with the
time at which each piece came. It costs some microseconds a piece, so that it is not what is measured."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from graphllm.config import ConfigError


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether the model made what is in it. A chunk of a completion without text is a token without text, unless
        it only says why it ended; a chunk of a chat without any is the role."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        d = self.delta
        return bool(d.content or d.reasoning_content or d.reasoning or d.tool_calls)


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Timeline:
    """One streamed request. Times are seconds of `time.perf_counter`.

    pieces: when each piece of output came; it may be several tokens. ended: when the end was announced. Tokens are the
    server's count. error: why the request failed, None when it did not.
    """

    started: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return (self.pieces[0] if self.pieces else self.ended) - self.started

    @property
    def e2el(self) -> float:
        """Seconds from end to end."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None where there is no other."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


class Reply:
    """What came back. status: 0 while nothing has. body: as far as nothing else took it."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take the next part of the body."""
        self.body += data

    def describe(self) -> str:
        """The error that it is, for people."""
        try:
            error = _decode(self.body).error
        except msgspec.MsgspecError:
            error = None
        message = error.message if isinstance(error, _Error) else error or self.body.decode(errors="replace").strip()
        return f"HTTP {self.status}: {message:.200}"


class _Events(Reply):
    """A reply that is a stream of chunks, read into a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self._rest = b""
        self._usage: _Usage | None = None
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        if self.status != 200:
            super().feed(data, now)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        timeline = self._timeline
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError as damage:
            timeline.error = timeline.error or f"a chunk cannot be read: {damage}"
            return
        if chunk.error is not None:
            message = chunk.error if isinstance(chunk.error, str) else chunk.error.message
            timeline.error = timeline.error or f"error in the stream: {message:.200}"
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.has_output:
                timeline.pieces.append(now)
                timeline.ended = now
            if choice.finish_reason is not None:
                timeline.finish_reason, timeline.ended = choice.finish_reason, now

    def finish(self) -> None:
        """The reply is complete; find out whether the stream is."""
        timeline = self._timeline
        if self.status != 200:
            timeline.error = self.describe()
        elif timeline.error is None:
            timeline.error = self._missing()
        if self._usage is not None:
            timeline.prompt_tokens = self._usage.prompt_tokens
            timeline.output_tokens = self._usage.completion_tokens

    def _missing(self) -> str | None:
        reason = self._timeline.finish_reason
        if reason in ("error", "abort"):
            return f"finish_reason is {reason}"
        if reason is None:
            return "the stream ended without a finish_reason"
        if not self._done:
            return "the stream ended without [DONE]"
        return "the stream has no usage" if self._usage is None else None


class _Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._now = 0.0

    async def exchange(self, request: bytes, reply: Reply) -> None:
        """Send a request and take the reply. Raises ConnectionError when the connection breaks."""
        assert self._transport is not None
        self._reply, self._waiter = reply, asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._reply = self._waiter = None

    @property
    def open(self) -> bool:
        """Whether another request may follow."""
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close it at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(
            exc if isinstance(exc, ConnectionError) else ConnectionResetError("the server closed the connection")
        )

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as damage:
            self._fail(ConnectionAbortedError(f"the reply is no HTTP: {damage}"))

    def on_headers_complete(self) -> None:  # called by httptools, as are the next two
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.feed(body, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, reason: ConnectionError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(reason)


class HttpClient:
    """Requests to one server, each on a connection of its own, which the next ones reuse.

    url: http or https, with a path in front of the API's where the server has one. timeout: seconds for one request.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as reason:
            raise ConfigError(f"url is {url!r:.80}: {reason}; give one such as http://127.0.0.1:8000") from reason
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url is {url!r:.80}: give one such as http://127.0.0.1:8000")
        self._host, self._timeout = parts.hostname, timeout
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n{key}Content-Type: application/json\r\n"
        self._idle: list[_Connection] = []

    async def fetch(self, path: str) -> Reply:
        """GET. Raises OSError, a TimeoutError among them."""
        reply = Reply()
        async with asyncio.timeout(self._timeout):
            await self._exchange("GET", path, b"", reply)
        return reply

    async def stream(self, path: str, body: bytes) -> Timeline:
        """POST a body that asks for a stream. What goes wrong is in the timeline."""
        timeline = Timeline(time.perf_counter())
        events = _Events(timeline)
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange("POST", path, body, events)
        except TimeoutError:
            timeline.error = f"no end within {self._timeout:g} s"
        except OSError as reason:
            timeline.error = timeline.error or reason.strerror or str(reason)
        else:
            events.finish()
        return timeline

    def close(self) -> None:
        """Close the connections that are idle."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, method: str, path: str, body: bytes, reply: Reply) -> None:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        connection = self._take()
        reused = connection is not None
        connection = connection or await self._connect()
        try:
            await connection.exchange(request, reply)
        except ConnectionError:
            if not reused or reply.status:
                raise
            connection = await self._connect()  # the server closed the idle one just then
            await connection.exchange(request, reply)
        if connection.open:
            self._idle.append(connection)

    def _take(self) -> _Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return connection
