"""An answer 500 and what comes behind it on the same connection."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from graphllm.config.server import AccessConfig
from graphllm.server.http.connection import LimitedProtocol
from graphllm.server.http.errors import describe, error_response
from graphllm.server.middleware import Middleware
from graphllm.server.service.shared_state import Shared
from graphllm.server.supervision.metrics import Metrics
from tests.waiting import PATIENCE, until


def failing() -> FastAPI:
    app = FastAPI()

    @app.get("/wrong")
    async def wrong() -> None:
        raise KeyError("nobody thought of it")

    @app.get("/half")
    async def half() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"a"
            raise KeyError("nor of that")

        return StreamingResponse(pieces())

    @app.get("/well")
    async def well() -> dict[str, bool]:
        return {"well": True}

    @app.exception_handler(Exception)
    async def told(request: Request, error: Exception) -> Response:
        status, message, headers, code = describe(error)
        return error_response(request.scope, status, message, headers, code)

    return app


@pytest.fixture
def connection() -> Iterator[http.client.HTTPConnection]:
    nothing = cast(Any, None)  # of what the processes of a server share, small bodies need nothing
    app = Middleware(failing(), AccessConfig(), 1 << 20, Metrics("m"), Shared(*[nothing] * 6))
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=LimitedProtocol, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as opened:
        yield opened
    server.should_exit = True
    thread.join()


def test_a_connection_lives_on_behind_an_error(
    connection: http.client.HTTPConnection, caplog: pytest.LogCaptureFixture
) -> None:
    socket = None
    for _ in range(3):
        for path, status in (("/wrong", 500), ("/well", 200), ("/nothing", 404), ("/wrong", 500)):
            connection.request("GET", path, headers={"x-request-id": "mine"})
            answer = connection.getresponse()
            body = json.loads(answer.read())
            assert (answer.status, answer.getheader("x-request-id")) == (status, "mine")
            assert socket in (None, connection.sock)
            socket = connection.sock
            assert "thought" not in str(body)

    def errors() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno == logging.ERROR]

    until(lambda: len(errors()) == 6)  # the last one comes behind the answer
    told = errors()
    assert {record.getMessage() for record in told} == {"request mine failed"}
    assert all(isinstance((record.exc_info or (None, None))[1], KeyError) for record in told)


def test_half_an_answer_has_no_end(connection: http.client.HTTPConnection) -> None:
    """A client must not take it for a whole one."""
    connection.request("GET", "/half")
    with pytest.raises(http.client.IncompleteRead):
        connection.getresponse().read()
