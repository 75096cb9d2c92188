"""The life of a router: a socket, the application, signals, an end that lets answers reach their clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop

from graphllm.config.server import ListenConfig
from graphllm.server.process.network import BACKLOG, listening, prepare_process
from graphllm.server.router.router import Router
from graphllm.server.router.upstream import Upstream

_log = logging.getLogger(__name__)
_MAX_BODY = 64 << 20  # bytes


class _Server(uvicorn.Server):
    """Signals are `_serve`'s."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def route(prefill: Sequence[Upstream], decode: Sequence[Upstream], listen: ListenConfig) -> int:
    """Route until SIGTERM or Ctrl-C; the exit status. Raises ConfigError for an address that cannot be used."""
    prepare_process()
    with listening(listen) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(Router(prefill, decode, _MAX_BODY), listener, listen.host))


async def _serve(router: Router, listener: socket.socket, host: str) -> int:
    server = _Server(
        uvicorn.Config(
            router,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,  # longer than the clients' pools keep a connection, so that they close it
            backlog=BACKLOG,
        )
    )

    def end() -> None:
        server.force_exit = server.should_exit  # a second signal ends it at once
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    watching = asyncio.create_task(router.watch())
    _log.info("listening on http://%s:%s", host, listener.getsockname()[1])
    try:
        await server.serve([listener])
    finally:
        watching.cancel()
    return 0
