"""`graphllm serve --headless`: a machine that lends its devices to an engine on another one."""

from __future__ import annotations

from pathlib import Path

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.server import ServerLogConfig
from graphllm.loading.checkpoint.source import find_source
from graphllm.loading.core.node_main import serve_node
from graphllm.server.supervision.logs import start_log


def serve_headless(args: EngineArgs, log: ServerLogConfig) -> int:
    """The exit status. Raises ConfigError."""
    if not args.node_rank:
        raise ConfigError(
            f"headless: node_rank is {args.node_rank} of nnodes {args.nnodes}, which is the engine's own machine; give "
            "1 or more, or leave headless out"
        )
    if args.distributed_executor_backend == "ray":
        raise ConfigError("headless: Ray starts its nodes itself (`ray start`); leave it out")
    start_log(log, f"node-{args.node_rank}")
    folder = find_source(args).folder
    try:
        serve_node(args.master_addr, args.master_port, args.node_rank, Path(folder))
    except KeyboardInterrupt:
        return 130
    return 0
