"""The life of a server: sockets first, then the engine and the HTTP front, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import uvloop

from graphllm.engine.process.messages import EngineDeadError
from graphllm.engine.process.spawn import Child
from graphllm.entrypoints.tracing import Tracing
from graphllm.loading.artifact.model import ResolvedModel
from graphllm.server.process.network import listening, prepare_process, read_tls
from graphllm.server.process.options import ServerOptions
from graphllm.server.supervision.engine_supervisor import EngineSupervisor
from graphllm.server.supervision.engine_view import SupervisorOptions
from graphllm.server.supervision.metrics import Metrics

_log = logging.getLogger(__name__)


class Front(Protocol):
    """What speaks HTTP: this process (`graphllm.server.process.local_front.LocalFront`), or several others
    (`graphllm.server.process.fronts.controller.Fronts`)."""

    @property
    def metrics(self) -> Sequence[Metrics]:
        """Of each model."""
        ...

    async def serve(self, listener: socket.socket) -> None:
        """Until `stop`."""
        ...

    async def running(self) -> int:
        """Requests that are not finished."""
        ...

    async def stop(self) -> None:
        """The engine is closed: let the ends of answers reach their clients."""
        ...


class Opening(NamedTuple):
    """A model that is to be served. names: in requests. open: finds it, in a thread. children: processes of its engine
    cores, already started."""

    names: Sequence[str]
    open: Callable[[], ResolvedModel]
    options: SupervisorOptions
    children: Sequence[Child]


def serve(models: Sequence[Opening], options: ServerOptions) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status. Raises ConfigError for an address or a model that cannot be
    used."""
    tls = read_tls(options.config.listen)
    tracing = Tracing(options.traces) if options.traces else None
    prepare_process()
    with listening(options.config.listen) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engines = [(m.names, EngineSupervisor(open=m.open, options=m.options, children=m.children)) for m in models]
        try:
            return runner.run(_serve(engines, options, listener, tls, tracing))
        finally:
            if tracing is not None:
                tracing.close()


async def _serve(
    engines: Sequence[tuple[Sequence[str], EngineSupervisor]],
    options: ServerOptions,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    tracing: Tracing | None,
) -> int:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    supervisors = [supervisor for _, supervisor in engines]
    presses = 0

    def end() -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            _log.warning("a second signal: stopping at once")
            for supervisor in supervisors:
                supervisor.kill()
            os._exit(130)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    for supervisor in supervisors:
        supervisor.phases["imports"] = time.monotonic() - options.started
    running = [asyncio.create_task(supervisor.run()) for supervisor in supervisors]
    # The engine's process loads while the application is imported here; its start must not wait for that.
    await asyncio.wait(running, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
    begun = time.monotonic()
    front = _front(engines, options, tls, tracing)
    for supervisor in supervisors:
        supervisor.phases["application"] = time.monotonic() - begun
    http = asyncio.create_task(front.serve(listener))
    scheme = "https" if tls else "http"
    _log.info(
        "listening on %s",
        options.config.listen.uds or f"{scheme}://{options.config.listen.host}:{listener.getsockname()[1]}",
    )
    telling = asyncio.create_task(_tell(supervisors, front.metrics, options))
    await asyncio.wait({*running, http, asyncio.create_task(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    code = 0
    if ended.is_set():
        await _drain(supervisors, front, options.config.serving.shutdown_timeout)
    for engine in running:
        engine.cancel()
    try:
        for engine in running:
            with contextlib.suppress(asyncio.CancelledError):
                await engine
    except EngineDeadError as death:
        _log.error("the engine did not start: %s\n%s", death, death.cause.traceback)
        code = 1
    finally:
        for supervisor in supervisors:
            await supervisor.close()
        await front.stop()
        await http
    return code


def _front(
    engines: Sequence[tuple[Sequence[str], EngineSupervisor]],
    options: ServerOptions,
    tls: ssl.SSLContext | None,
    tracing: Tracing | None,
) -> Front:
    if options.config.serving.api_server_count == 1:
        from graphllm.server.process.local_front import LocalFront

        return LocalFront(engines, options, tls, tracing)
    from graphllm.server.process.fronts.controller import Fronts

    ((_, supervisor),) = engines
    return Fronts(supervisor, options)


async def _tell(supervisors: Sequence[EngineSupervisor], metrics: Sequence[Metrics], options: ServerOptions) -> None:
    """The start-up line, once all engines are ready."""
    for supervisor in supervisors:
        await supervisor.was_ready.wait()
    gc.collect()
    gc.freeze()  # the program itself is never garbage; to look for more of it then takes a millisecond
    for supervisor, counts in zip(supervisors, metrics, strict=True):
        supervisor.phases["total"] = time.monotonic() - options.started
        supervisor.changed.set()
        counts.startup(supervisor.phases)
        _log.info(
            "ready in %.2f s",
            supervisor.phases["total"],
            extra={"notes": {k: round(v, 3) for k, v in supervisor.phases.items()}},
        )


async def _drain(supervisors: Sequence[EngineSupervisor], front: Front, seconds: float) -> None:
    """Refuse new requests and let those in flight end."""
    for supervisor in supervisors:
        supervisor.drain()
    count = await front.running()
    stats = [core for supervisor in supervisors for core in await supervisor.stats() if core is not None]
    if any(core.paused and not core.running for core in stats):  # what waits in an engine that sleeps does not end
        seconds = 0.0
    _log.info("shutting down: %d requests in flight, %.0f s for them", count, seconds)
    deadline = time.monotonic() + seconds
    while count and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        count = await front.running()
    if count:
        _log.warning("%d requests are cut off; --shutdown-timeout gives them longer", count)
