"""Upstream: a server behind the router, asked over HTTP/1.1, and whether it is there."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Sequence
from urllib.parse import urlsplit

import httptools

from graphllm.config import ConfigError

Headers = Sequence[tuple[bytes, bytes]]
_CONNECTING = 5.0  # seconds
_LOOKING = 10.0  # seconds that a server may take to say how it is
_ALONE = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"})  # of one hop


class UpstreamError(Exception):
    """A server gives no answer; the message says why."""


class Answer:
    """Of a server; its body comes by `chunks`. close: ends the connection, and with it what the server does for it.

    status, headers: without those of one connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._bodies = list[bytes]()
        self._begun = self._ended = False
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()

    def on_header(self, name: bytes, value: bytes) -> None:  # called by httptools, as are the next ones
        if name.lower() not in _ALONE:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_message_complete(self) -> None:
        self._ended = True

    async def begin(self) -> None:
        """Wait for the headers. Raises UpstreamError."""
        while not self._begun:
            await self._feed()
        self.status = self._parser.get_status_code()

    async def _feed(self) -> None:
        try:
            data = await self._reader.read(1 << 16)
            if not data:
                raise UpstreamError("it has closed the connection")
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as failure:
            raise UpstreamError(f"its answer broke off ({failure})") from failure

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises UpstreamError where it breaks off."""
        while True:
            while self._bodies:
                yield self._bodies.pop(0)
            if self._ended:
                return
            await self._feed()

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


class Upstream:
    """A server.

    url: of it, without /v1.
    in_flight: requests that it answers.
    asked: how often it was.
    down: set while it does not answer.
    """

    def __init__(self, option: str, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as reason:
            raise ConfigError(f"{option} is {url!r:.80}: {reason}; give one such as http://127.0.0.1:8100") from reason
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{option} is {url!r:.80}: give a URL such as http://127.0.0.1:8100")
        self.url = url
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1").encode()
        self._name = parts.netloc.rpartition("@")[2].encode()
        self.in_flight = self.asked = 0
        self.down = asyncio.Event()

    async def ask(self, method: bytes, path: bytes, headers: Headers, body: bytes = b"") -> Answer:
        """An answer whose headers are there. Raises UpstreamError."""
        try:
            connecting = asyncio.open_connection(self._host, self._port, ssl=self._tls)
            reader, writer = await asyncio.wait_for(connecting, _CONNECTING)
        except (OSError, TimeoutError) as failure:
            raise UpstreamError(f"it cannot be reached ({failure or 'no answer'})") from failure
        own = [(b"host", self._name), (b"connection", b"close"), (b"content-length", str(len(body)).encode())]
        sent = {b"host", b"content-length", b"expect", b"accept-encoding", *_ALONE}
        lines = [b"%s: %s\r\n" % pair for pair in (*own, *(h for h in headers if h[0].lower() not in sent))]
        answer = Answer(reader, writer)
        try:
            writer.write(b"%s %s%s HTTP/1.1\r\n%s\r\n" % (method, self._path, path, b"".join(lines)) + body)
            await answer.begin()
        except BaseException:
            answer.close()
            raise
        return answer

    async def look(self) -> None:
        """Find out whether it can be asked now."""
        try:
            async with asyncio.timeout(_LOOKING):
                answer = await self.ask(b"GET", b"/health", ())
                with contextlib.closing(answer):
                    found = answer.status < 500
        except (UpstreamError, TimeoutError):
            found = False
        if found:
            self.down.clear()
        else:
            self.down.set()
