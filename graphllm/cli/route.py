"""`graphllm route`: the log of a router; the router itself is `graphllm.server.router`."""

from __future__ import annotations

from collections.abc import Sequence

from graphllm.config.server import ListenConfig, ServerLogConfig
from graphllm.server.router.serving import route
from graphllm.server.router.upstream import Upstream
from graphllm.server.supervision.logs import start_log


def route_requests(prefill: Sequence[str], decode: Sequence[str], host: str, port: int) -> int:
    """Route until a signal; the exit status. Raises ConfigError for an address that cannot be used."""
    start_log(ServerLogConfig())
    servers = [Upstream("prefill", url) for url in prefill], [Upstream("decode", url) for url in decode]
    return route(*servers, ListenConfig(host=host, port=port))
