"""`ServerOptions`: how a server listens, whom it answers, and what it says of itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphllm.chat.call import Rules
from graphllm.server.http.access import Access
from graphllm.server.service.adapters import ServedAdapter
from graphllm.server.supervision.logs import LogOptions


@dataclass(frozen=True)
class ServerOptions:
    """uds: a Unix socket instead of host and port. shutdown_timeout: seconds that requests in flight may take after
    SIGTERM. access: who may ask. rules: of bodies. names: of the model, as requests give it. max_body: bytes of a
    request. keep_alive: seconds without an event in a stream before a sign of life, 0 for none. certfile, keyfile:
    of this server, in PEM, for TLS; keyfile None: in certfile. ca_certs: of those who sign clients' certificates;
    cert_reqs: whether clients must have one, as a number of `ssl.VerifyMode`. traces: URL of a collector of
    OpenTelemetry's. adapters: served beside the model. lora_dir: folder whose adapters may be loaded and unloaded by
    requests, None for none. fronts: processes that speak HTTP. rank: of this server's engine, in metrics. log: of all
    of them. started: `time.monotonic` when the process began."""

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
    adapters: Sequence[ServedAdapter] = ()
    lora_dir: str | None = None
    fronts: int = 1
    rank: int = 0
    log: LogOptions = field(default_factory=LogOptions)
    started: float = field(default_factory=time.monotonic)
