"""`graphllm serve --data-parallel-multi-port-external-lb`: a server for each rank, and one that tells their health."""

from __future__ import annotations

import os
import sys

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.server import ServerConfig
from graphllm.host.machine import detect_target, usable_cores
from graphllm.loading.artifact.resolve import check_devices
from graphllm.server.process.ranks.options import RankOptions
from graphllm.server.process.ranks.supervisor import supervise
from graphllm.server.supervision.logs import start_log


def serve_ranks(args: EngineArgs, server: ServerConfig, gpus: int) -> int:
    """The exit status. gpus: of each rank. Raises ConfigError."""
    start_log(server.log, "supervisor")
    ranks = RankOptions(server, args.data_parallel_size, gpus)
    device = detect_target(args.target).device
    check_devices(device, ranks.ranks, ranks.gpus)
    command = sys.argv[1:]
    if command[:1] != ["serve"]:
        raise ConfigError("data-parallel-multi-port-external-lb: only the command `graphllm serve` can start its ranks")
    if device == "cpu" and args.threads is None and "OMP_NUM_THREADS" not in os.environ:
        command[1:1] = ["--threads", str(max(1, usable_cores() // ranks.ranks))]
    return supervise(ranks, command, device == "cpu")
