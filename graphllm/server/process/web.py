"""What speaks HTTP in one process: uvicorn's server of the application."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from graphllm.entrypoints.tracing import Tracing
from graphllm.server.app import create_app
from graphllm.server.http.connection import LimitedProtocol
from graphllm.server.process.network import BACKLOG
from graphllm.server.process.options import ServerOptions
from graphllm.server.service.generation import Running
from graphllm.server.service.service import Limits, Service
from graphllm.server.service.shared_state import Shared
from graphllm.server.supervision.engine_view import EngineView
from graphllm.server.supervision.metrics import Metrics

_LAST_WORDS = 2  # seconds for the ends of answers to reach their clients


class WebServer(uvicorn.Server):
    """Signals are for who runs it."""

    def protocol(self, ended: Callable[[], None]) -> LimitedProtocol:
        """Of one more connection, once it is started. ended: called when that is lost."""
        protocol = LimitedProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.ended = ended
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def service_of(
    view: EngineView,
    names: Sequence[str],
    metrics: Metrics,
    running: Running,
    shared: Shared,
    options: ServerOptions,
    tracing: Tracing | None,
) -> Service:
    """Of one model. names: in requests. metrics, running: what this process counts of it, and its requests in the
    engine."""
    return Service(
        view,
        tuple(names),
        metrics,
        shared,
        Limits(body=options.config.serving.max_body_size),
        options.config.serving.sse_keep_alive_interval,
        options.config.chat,
        running=running,
        tracing=tracing,
    )


def web_server(
    services: Sequence[Service], http: Metrics, options: ServerOptions, tls: ssl.SSLContext | None
) -> WebServer:
    """services: of the models. http: what this process counts of all requests."""
    config = uvicorn.Config(
        create_app(services, http, options.config.access, options.config.models.lora_dir),
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # longer than the clients' pools keep a connection, so that they close it
        timeout_graceful_shutdown=_LAST_WORDS,
        backlog=BACKLOG,
        ssl_context_factory=(lambda config, default: tls) if tls else None,
    )
    return WebServer(config)
