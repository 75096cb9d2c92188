"""`LocalFront`: the server's own process speaks HTTP."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from graphllm.entrypoints.tracing import Tracing
from graphllm.server.multi_model import JointOverview
from graphllm.server.process.options import ServerOptions
from graphllm.server.process.single_process import OwnOverview, in_memory
from graphllm.server.process.web import service_of, web_server
from graphllm.server.service.adapters import OwnAdapters
from graphllm.server.service.generation import Running
from graphllm.server.service.shared_state import Overview
from graphllm.server.service.stored_responses import ResponseStore
from graphllm.server.supervision.engine_supervisor import EngineSupervisor
from graphllm.server.supervision.metrics import Metrics


class LocalFront:
    """This process speaks HTTP. engines: with the names of their models."""

    def __init__(
        self,
        engines: Sequence[tuple[Sequence[str], EngineSupervisor]],
        options: ServerOptions,
        tls: ssl.SSLContext | None,
        tracing: Tracing | None,
    ) -> None:
        self._supervisors = [supervisor for _, supervisor in engines]
        parts = {
            names[0]: (view, Metrics(names[0], {"model": names[0]}, rank=options.rank), Running())
            for names, view in engines
        }
        self._metrics = [metrics for _, metrics, _ in parts.values()]
        http = self._metrics[0]
        overview: Overview = OwnOverview(*parts[engines[0][0][0]])
        if len(engines) > 1:
            http = Metrics("")
            overview = JointOverview(http, parts)
        shared = in_memory(overview, options.config, ResponseStore(), options.adapters)
        services = []
        for names, view in engines:
            _, metrics, running = parts[names[0]]
            services.append(service_of(view, names, metrics, running, shared, options, tracing))
            shared = shared._replace(adapters=OwnAdapters(()))  # the given adapters belong to the first model
        self._server = web_server(services, http, options, tls)

    @property
    def metrics(self) -> list[Metrics]:
        """Of each model."""
        return self._metrics

    async def serve(self, listener: socket.socket) -> None:
        await self._server.serve([listener])

    async def running(self) -> int:
        return sum(supervisor.running for supervisor in self._supervisors)

    async def stop(self) -> None:
        self._server.should_exit = True
