"""`graphllm serve`: which processes it starts first; `graphllm.cli.serve.serve` is the server."""

from __future__ import annotations

from graphllm.cli.late import call
from graphllm.config import EngineArgs
from graphllm.config.parallel import ParallelConfig
from graphllm.config.server import ServerConfig
from graphllm.config.setting import assemble
from graphllm.engine.process.spawn import Child, end, spawn, spawn_cores


def start(server: ServerConfig, args: EngineArgs, early: list[Child]) -> int:
    """Serve; the exit status. early: a process of an engine core that was started before the command line was read.
    Raises ConfigError."""
    one_rank, gpus = args.data_parallel_rank is not None, (args.tensor_parallel_size or 1) * args.pipeline_parallel_size
    parallel: ParallelConfig = assemble(ParallelConfig, vars(args))
    if server.ranks.headless:
        end(early)
        return int(call("serve.node:serve_headless", args, server.log))
    if server.ranks.data_parallel_multi_port_external_lb and not one_rank:
        end(early)
        return int(call("serve.ranks:serve_ranks", args, server, gpus))
    # The engine's processes start first: their import of torch takes longest. A cluster chooses devices of ranks later.
    here = 1 if args.distributed_executor_backend == "ray" else parallel.ranks_of_node(gpus)
    children = spawn_cores(1 if one_rank else args.data_parallel_size, here, early)
    end(early)
    others = [spawn() for _ in server.models.also]
    try:
        return int(call("serve.serve:serve", server, args, children, others))
    finally:
        end([*children, *others])
