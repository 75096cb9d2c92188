"""uvicorn's HTTP/1.1 connection with limits on what comes before the body: size of the headers, and time for them."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from graphllm.server.http.wire import encode

_HEADER_BYTES = 64 << 10  # of the request line and all headers
_HEADER_SECONDS = 30.0  # from the first byte, or from the connection, to the end of the headers


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 to headers that are too large, 400 to what is no HTTP, and closes connections that send none."""

    _seen = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:  # still in the headers
            self._seen += len(data)
            if self._seen > _HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._seen = 0
        if self._timer is None:  # a further request on this connection
            self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        status, text = ("400 Bad Request", "request: no HTTP/1.1 that can be read")
        if self._seen > _HEADER_BYTES:
            status = "431 Request Header Fields Too Large"
            text = f"headers: larger than {_HEADER_BYTES} bytes; send fewer"
        body = encode({"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}})
        head = ("content-type: application/json", f"content-length: {len(body)}", "connection: close")
        self.transport.write("\r\n".join((f"HTTP/1.1 {status}", *head, "\r\n")).encode() + body)
        self.transport.close()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
