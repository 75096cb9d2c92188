"""The life of a server: sockets first, then the engine beside what speaks HTTP, signals, an orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from graphllm.engine.messages import EngineDeadError
from graphllm.engine.spawn import Child
from graphllm.entrypoints.model import ResolvedModel
from graphllm.server.network import listening, prepare_process, read_tls
from graphllm.server.options import ServerOptions

if TYPE_CHECKING:
    from graphllm.entrypoints.tracing import Tracing
    from graphllm.server.operations.engine_supervisor import EngineSupervisor
    from graphllm.server.operations.engine_view import SupervisorOptions
    from graphllm.server.operations.metrics import Metrics

_log = logging.getLogger(__name__)


class Front(Protocol):
    """What speaks HTTP: this process (`Here`), or several others (`graphllm.server.fronts.controller.Fronts`)."""

    metrics: Metrics

    async def serve(self, listener: socket.socket) -> None:
        """Until `stop`."""
        ...

    async def running(self) -> int:
        """Requests that are not finished."""
        ...

    async def stop(self) -> None:
        """The engine is closed: let the ends of answers reach their clients."""
        ...


class Here:
    """This process speaks HTTP."""

    def __init__(
        self,
        supervisor: EngineSupervisor,
        options: ServerOptions,
        tls: ssl.SSLContext | None,
        tracing: Tracing | None,
    ) -> None:
        from graphllm.server.alone import OwnOverview, in_memory
        from graphllm.server.generation import Running
        from graphllm.server.operations.metrics import Metrics
        from graphllm.server.responses.store import ResponseStore
        from graphllm.server.web import web_server

        self._supervisor, running = supervisor, Running()
        self.metrics = Metrics(options.names[0], {"model": options.names[0]}, rank=options.rank)
        overview = OwnOverview(supervisor, self.metrics, running)
        shared = in_memory(overview, options.max_body, options.access.rate, ResponseStore(), options.adapters)
        self._server = web_server(supervisor, self.metrics, running, shared, options, tls, tracing)

    async def serve(self, listener: socket.socket) -> None:
        await self._server.serve([listener])

    async def running(self) -> int:
        return self._supervisor.running

    async def stop(self) -> None:
        self._server.should_exit = True


def serve(
    open: Callable[[], ResolvedModel],
    options: ServerOptions,
    supervisor_options: SupervisorOptions,
    children: Sequence[Child],
) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status. children: processes of its engine cores. Raises ConfigError for
    an address or a model that cannot be used."""
    from graphllm.entrypoints.tracing import Tracing

    tls = read_tls(options)
    tracing = Tracing(options.traces) if options.traces else None
    prepare_process()
    with listening(options) as listener:
        import uvloop

        from graphllm.server.operations.engine_supervisor import EngineSupervisor

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            supervisor = EngineSupervisor(open=open, options=supervisor_options, children=children)
            try:
                return runner.run(_serve(supervisor, options, listener, tls, tracing))
            finally:
                if tracing is not None:
                    tracing.close()


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
    front = _front(supervisor, options, tls, tracing)
    supervisor.phases["application"] = time.monotonic() - begun
    http = asyncio.create_task(front.serve(listener))
    scheme = "https" if tls else "http"
    _log.info("listening on %s", options.uds or f"{scheme}://{options.host}:{listener.getsockname()[1]}")
    telling = asyncio.create_task(_tell(supervisor, front.metrics, options))
    await asyncio.wait({engine, http, asyncio.create_task(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    code = 0
    if ended.is_set():
        await _drain(supervisor, front, options.shutdown_timeout)
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
        await front.stop()
        await http
    return code


def _front(
    supervisor: EngineSupervisor, options: ServerOptions, tls: ssl.SSLContext | None, tracing: Tracing | None
) -> Front:
    if options.fronts == 1:
        return Here(supervisor, options, tls, tracing)
    from graphllm.server.fronts.controller import Fronts

    return Fronts(supervisor, options)


async def _tell(supervisor: EngineSupervisor, metrics: Metrics, options: ServerOptions) -> None:
    """The start-up line, once the engine is ready."""
    await supervisor.was_ready.wait()
    gc.collect()
    gc.freeze()  # the program itself is never garbage; to look for more of it then takes a millisecond
    supervisor.phases["total"] = time.monotonic() - options.started
    supervisor.changed.set()
    metrics.startup(supervisor.phases)
    _log.info(
        "ready in %.2f s",
        supervisor.phases["total"],
        extra={"notes": {k: round(v, 3) for k, v in supervisor.phases.items()}},
    )


async def _drain(supervisor: EngineSupervisor, front: Front, seconds: float) -> None:
    """Refuse new requests and let those in flight end."""
    supervisor.drain()
    count = await front.running()
    _log.info("shutting down: %d requests in flight, %.0f s for them", count, seconds)
    deadline = time.monotonic() + seconds
    while count and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        count = await front.running()
    if count:
        _log.warning("%d requests are cut off; --shutdown-timeout gives them longer", count)
