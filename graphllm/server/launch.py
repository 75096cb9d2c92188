"""The life of a server: sockets first, then the engine beside the application's import, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from graphllm.config import ConfigError
from graphllm.engine.messages import EngineDeadError
from graphllm.engine.spawn import Child
from graphllm.entrypoints.model import ResolvedModel
from graphllm.server.access import Access
from graphllm.server.chat.call import Rules

if TYPE_CHECKING:
    import uvicorn

    from graphllm.server.operations.engine_supervisor import EngineSupervisor, SupervisorOptions
    from graphllm.server.operations.metrics import Metrics
    from graphllm.server.operations.tracing import Tracing

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_UNSENT = 128 << 10  # bytes for each client who does not read; the kernel would keep megabytes
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h
_LAST_WORDS = 2  # seconds for the ends of answers to reach their clients


@dataclass(frozen=True)
class ServerOptions:
    """uds: a Unix socket instead of host and port. shutdown_timeout: seconds that requests in flight may take after
    SIGTERM. access: who may ask. rules: of bodies. names: of the model, as requests give it. max_body: bytes of a
    request. keep_alive: seconds without an event in a stream before a sign of life, 0 for none. certfile, keyfile:
    of this server, in PEM, for TLS; keyfile None: in certfile. ca_certs: of those who sign clients' certificates;
    cert_reqs: whether clients must have one, as a number of `ssl.VerifyMode`. traces: URL of a collector of
    OpenTelemetry's. started: `time.monotonic` when the process began."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    access: Access = field(default_factory=Access)
    rules: Rules = field(default_factory=Rules)
    names: Sequence[str] = ()
    shutdown_timeout: float = 30.0
    max_body: int = 32 << 20
    keep_alive: float = 15.0
    certfile: Path | None = None
    keyfile: Path | None = None
    ca_certs: Path | None = None
    cert_reqs: int = 0
    traces: str | None = None
    started: float = field(default_factory=time.monotonic)


def serve(
    open: Callable[[], ResolvedModel], options: ServerOptions, supervisor_options: SupervisorOptions, child: Child
) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status. child: the engine's process. Raises ConfigError for an address or
    a model that cannot be used."""
    from graphllm.server.operations.tracing import Tracing

    tls = _tls(options)
    tracing = Tracing(options.traces) if options.traces else None
    # Memory of large bodies goes back at once: by default, the first that is freed makes the C library keep more.
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    mallopt(_M_ARENA_MAX, 2)
    # A connection is a file, and the soft limit is often 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with _socket(options) as listener:
        import uvloop

        from graphllm.server.operations.engine_supervisor import EngineSupervisor

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            supervisor = EngineSupervisor(open, supervisor_options, child)
            try:
                return runner.run(_serve(supervisor, options, listener, tls, tracing))
            finally:
                if tracing is not None:
                    tracing.close()


@contextlib.contextmanager
def _socket(options: ServerOptions) -> Iterator[socket.socket]:
    """Bound before anything is loaded, so that a port in use is said at once."""
    if options.uds is not None:
        path = options.uds
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"uds is {str(path)!r}: that is a file; give a path for a socket")
            _check_unused(path)
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        target: str | tuple[str, int] = str(path)
    else:
        listener, target = _tcp(options.host), (options.host, options.port)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT)  # connections have it from here
        try:
            listener.bind(target)
            listener.listen(_BACKLOG)
        except (OSError, OverflowError) as problem:
            where = f"uds is {str(target)!r}" if options.uds else f"port is {options.port}"
            raise ConfigError(f"{where}: cannot listen there ({problem}); give another one") from problem
        yield listener
    finally:
        listener.close()
        if options.uds is not None:
            options.uds.unlink(missing_ok=True)


def _tcp(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError as problem:
        raise ConfigError(
            f"host is {host!r}: no address of this machine ({problem}); give 127.0.0.1 or 0.0.0.0"
        ) from problem
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


def _check_unused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # left behind by a server that was killed
    raise ConfigError(f"uds is {str(path)!r}: another server listens there; give another path")


def _tls(options: ServerOptions) -> ssl.SSLContext | None:
    """Read before anything is loaded, so that a bad file is said at once. Raises ConfigError."""
    if options.certfile is None:
        for name in ("keyfile", "ca_certs", "cert_reqs"):
            if value := getattr(options, name):
                option = f"ssl-{name.replace('_', '-')}"
                raise ConfigError(f"{option} is {str(value)!r}: it has a meaning only with --ssl-certfile")
        return None
    if options.cert_reqs not in (0, 1, 2) or (options.cert_reqs and options.ca_certs is None):
        raise ConfigError(
            f"ssl-cert-reqs is {options.cert_reqs}: give 0 (no certificates of clients), or 1 (they may have one) or 2 "
            "(they must) with --ssl-ca-certs"
        )
    for name, path in (("certfile", options.certfile), ("keyfile", options.keyfile), ("ca-certs", options.ca_certs)):
        if path is not None:
            try:
                path.read_bytes()
            except OSError as problem:
                raise ConfigError(f"ssl-{name} is {str(path)!r}: cannot be read ({problem.strerror})") from problem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.VerifyMode(options.cert_reqs)
    try:
        # A password that is asked for would wait for somebody at the terminal.
        context.load_cert_chain(options.certfile, options.keyfile, password="")
    except OSError as problem:
        raise ConfigError(
            f"ssl-certfile is {str(options.certfile)!r}: with the key in {str(options.keyfile or options.certfile)!r} "
            f"it cannot be used ({problem}); give a certificate in PEM and its own key, without a password"
        ) from problem
    if options.ca_certs is not None:
        try:
            context.load_verify_locations(options.ca_certs)
        except OSError as problem:
            raise ConfigError(
                f"ssl-ca-certs is {str(options.ca_certs)!r}: no certificates in PEM ({problem})"
            ) from problem
    return context


async def _serve(
    supervisor: EngineSupervisor,
    options: ServerOptions,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    tracing: Tracing | None,
) -> int:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    presses = 0

    def end() -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            _log.warning("a second signal: stopping at once")
            supervisor.kill()
            os._exit(130)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    supervisor.phases["imports"] = time.monotonic() - options.started
    engine = asyncio.create_task(supervisor.run())
    # The engine's process loads while the application is imported here; its start must not wait for that.
    await asyncio.wait({engine}, timeout=0.05)
    begun = time.monotonic()
    server, metrics = _http(supervisor, options, tls, tracing)
    supervisor.phases["application"] = time.monotonic() - begun
    http = asyncio.create_task(server.serve([listener]))
    scheme = "https" if tls else "http"
    _log.info("listening on %s", options.uds or f"{scheme}://{options.host}:{listener.getsockname()[1]}")
    telling = asyncio.create_task(_tell(supervisor, metrics, options))
    await asyncio.wait({engine, http, asyncio.create_task(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    code = 0
    if ended.is_set():
        await _drain(supervisor, options.shutdown_timeout)
    engine.cancel()
    try:
        await engine
    except asyncio.CancelledError:
        pass
    except EngineDeadError as death:
        _log.error("the engine did not start: %s\n%s", death, death.cause.traceback)
        code = 1
    finally:
        await supervisor.close()
        server.should_exit = True
        await http
    return code


def _http(
    supervisor: EngineSupervisor, options: ServerOptions, tls: ssl.SSLContext | None, tracing: Tracing | None
) -> tuple[uvicorn.Server, Metrics]:
    import uvicorn

    from graphllm.server.app import create_app
    from graphllm.server.http.connection import LimitedProtocol
    from graphllm.server.operations.metrics import Metrics
    from graphllm.server.service import Limits, Service

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are this module's

    names = tuple(options.names)
    metrics = Metrics(names[0], {"model": names[0]})
    limits = Limits(body=options.max_body)
    service = Service(supervisor, names, metrics, limits, options.keep_alive, options.rules, tracing=tracing)
    config = uvicorn.Config(
        create_app(service, options.access),
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # longer than the clients' pools keep a connection, so that they close it
        timeout_graceful_shutdown=_LAST_WORDS,
        backlog=_BACKLOG,
        ssl_context_factory=(lambda config, default: tls) if tls else None,
    )
    return Server(config), metrics


async def _tell(supervisor: EngineSupervisor, metrics: Metrics, options: ServerOptions) -> None:
    """The start-up line, once the engine is ready."""
    await supervisor.was_ready.wait()
    gc.collect()
    gc.freeze()  # the program itself is never garbage; to look for more of it then takes a millisecond
    supervisor.phases["total"] = time.monotonic() - options.started
    metrics.startup(supervisor.phases)
    _log.info(
        "ready in %.2f s",
        supervisor.phases["total"],
        extra={"notes": {k: round(v, 3) for k, v in supervisor.phases.items()}},
    )


async def _drain(supervisor: EngineSupervisor, seconds: float) -> None:
    """Refuse new requests and let those in flight end."""
    count = supervisor.running
    _log.info("shutting down: %d requests in flight, %.0f s for them", count, seconds)
    supervisor.drain()
    deadline = time.monotonic() + seconds
    while supervisor.running and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if supervisor.running:
        _log.warning("%d requests are cut off; --shutdown-timeout gives them longer", supervisor.running)
