"""`ServerOptions`: the settings of a server, and facts that were found out from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphllm.config.server import ServerConfig
from graphllm.server.service.adapters import ServedAdapter


@dataclass(frozen=True)
class ServerOptions:
    """config: the settings.
    names: of the model, as requests give it.
    adapters: served with the model from the start.
    traces: URL of an OpenTelemetry collector.
    rank: number of this server's engine, in metrics.
    started: `time.monotonic` when the process began.
    """

    config: ServerConfig = field(default_factory=ServerConfig)
    names: Sequence[str] = ()
    adapters: Sequence[ServedAdapter] = ()
    traces: str | None = None
    rank: int = 0
    started: float = field(default_factory=time.monotonic)
