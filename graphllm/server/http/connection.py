"""uvicorn's HTTP/1.1 connection with limits on the headers, their size, their number and time for them, and on clients
that do not read what is sent to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from graphllm.server.http.wire import encode

_HEADER_BYTES = 64 << 10  # of the request line and all headers
_HEADER_SECONDS = 30.0  # from the first byte, or from the connection, to the end of the headers
_HEADERS = 256  # of one request, with the headers after a chunked body
LINGER_SECONDS = 2.0  # for what a client still sends of a request that was refused
_STALLED_SECONDS = 60.0  # in which a client must read something of what waits for it
_WAITING_BYTES = 64 << 10  # of an answer that wait for a client before the writer does; it has less to join to more


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 to headers that are too large or too many, and 400 to bytes that are no HTTP. It closes connections
    that send no headers, and connections of clients that have stopped reading; their requests end. ended: called at
    its end."""

    ended: Callable[[], None] | None = None
    _seen = 0
    _wrong = ""
    _refused = False
    _timer: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WAITING_BYTES)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._watch(False)
        super().connection_lost(exc)
        if self.ended is not None:
            self.ended()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch(False)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for a client who does not read
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._timer is not None and not self._refused:  # still in the headers
            self._seen += len(data)
            if self._seen > _HEADER_BYTES:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._seen = 0
        if self._timer is None:  # a further request on this connection
            self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= _HEADERS:
            self._wrong = f"headers: more than {_HEADERS}; send fewer"
            raise ValueError(self._wrong)  # ends in send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._wrong = f"host: the header is there {len(hosts)} times; send it once"
            raise ValueError(self._wrong)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if answering or self.pipeline:
            self.transport.abort()  # in the middle of an answer there is no place for another
            return
        status, text = "400 Bad Request", self._wrong or "request: no HTTP/1.1 that can be read"
        if self._seen > _HEADER_BYTES:
            text = f"headers: larger than {_HEADER_BYTES} bytes; send fewer"
        if text.startswith("headers"):
            status = "431 Request Header Fields Too Large"
        body = encode({"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}})
        head = ("content-type: application/json", f"content-length: {len(body)}", "connection: close")
        self.transport.write("\r\n".join((f"HTTP/1.1 {status}", *head, "\r\n")).encode() + body)
        self._linger()

    def _linger(self) -> None:
        """After a refusal, close when the client has, or a little later, and throw away what still comes: a connection
        that is closed on a client who sends is reset, and with it the answer on its way."""
        self._refused = True
        self._disarm()
        if self.cycle is not None:  # what was asked before ends as when its client leaves
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _watch(self, waiting: bool, before: int = 0) -> None:
        """waiting: for the client to read. before: bytes that waited when somebody looked last."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if waiting:
            left = self.transport.get_write_buffer_size()
            if before and left >= before:
                self.transport.abort()
            else:
                self._reading = self.loop.call_later(_STALLED_SECONDS, self._watch, True, left)

    def _arm(self) -> None:
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
