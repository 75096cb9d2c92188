"""Settings of several devices that matter while an engine runs; `CompileConfig` has how a model is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphllm.config.errors import ConfigError
from graphllm.config.setting import setting

_PLACED = "every engine core runs the same programs"
_BALANCED = "where experts lie is data of the same programs"
_NODES = "every rank runs the same programs, wherever it is"


@dataclass(frozen=True)
class ParallelConfig:
    """How many engines there are of a model, in how many stages each computes, and on which machines."""

    data_parallel_size: int = setting(
        1,
        help="Engine cores, each with the whole model on devices of its own (on a CPU: with its share of the cores); a "
        "request runs on one of them.",
        key=_PLACED,
        ge=1,
        le=64,
    )
    data_parallel_rank: int | None = setting(
        None,
        help="Number of the one engine core that this process has, of the data_parallel_size on this machine, where "
        "somebody else balances the load; None: it has all of them.",
        key=_PLACED,
        ge=0,
    )

    eplb_window_size: int = setting(
        1000,
        help="Of enable_eplb: number of the latest steps that say how busy an expert is.",
        key=_BALANCED,
        ge=1,
        le=2**16,
    )
    eplb_step_interval: int = setting(
        3000, help="Of enable_eplb: steps from one look at the load to the next.", key=_BALANCED, ge=1
    )
    eplb_log_balancedness: bool = setting(
        False,
        help="Of enable_eplb: log at each look how even the ranks' tokens are, mean over most, before and after it.",
        key=_BALANCED,
    )

    pipeline_parallel_size: int = setting(
        1,
        help="Stages of consecutive layers, each with its ranks; steps go through them one after the other.",
        key="every rank has the same programs, and makes the calls of its stage",
        ge=1,
        le=2**10,
    )

    distributed_executor_backend: Literal["uni", "mp", "ray"] | None = setting(
        None,
        help="What runs the ranks of an engine. uni: this process, of one rank. mp: processes of this machine, and of "
        "nnodes others. ray: processes on the nodes of a Ray cluster, as few as have enough free devices. None: uni or "
        "mp, by the number of ranks.",
        key=_NODES,
    )
    nnodes: int = setting(
        1,
        help="Machines that share the ranks, as many on each; on all but one run `graphllm serve --headless` with a "
        "node_rank. With ray: as many of its nodes, 1 for as few as can be.",
        key=_NODES,
        ge=1,
        le=2**10,
    )
    node_rank: int = setting(
        0, help="Which of nnodes machines this is; 0 has the engine core and all else.", key=_NODES, ge=0
    )
    master_addr: str = setting(
        "127.0.0.1", help="Address of the machine of node_rank 0, which the others of nnodes reach.", key=_NODES
    )
    master_port: int = setting(29501, help="Its port for them.", key=_NODES, ge=1, le=2**16 - 1)

    def ranks_of_node(self, ranks: int) -> int:
        """How many of an engine's ranks each machine has."""
        return ranks // self.nnodes

    @property
    def cores(self) -> int:
        """Of this process."""
        return self.data_parallel_size if self.data_parallel_rank is None else 1


def check_parallel(config: ParallelConfig, ranks: int) -> None:
    """Raise ConfigError for what cannot be. ranks: of an engine."""
    rank, nodes, backend = config.data_parallel_rank, config.nnodes, config.distributed_executor_backend
    if rank is not None and rank >= config.data_parallel_size:
        raise ConfigError(
            f"data_parallel_rank is {rank}: ranks of data_parallel_size {config.data_parallel_size} are below that"
        )
    if backend == "uni" and ranks > 1:
        raise ConfigError(
            f"distributed_executor_backend is uni: that is one rank, tensor_parallel_size times pipeline_parallel_size "
            f"is {ranks}; use mp, or leave it out"
        )
    if (nodes > 1 or (backend == "ray" and ranks > 1)) and config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size}: an engine with ranks on several machines is one "
            "engine core; use 1"
        )
    if ranks % nodes:
        raise ConfigError(
            f"nnodes is {nodes}: tensor_parallel_size times pipeline_parallel_size, {ranks}, is not a multiple of it; "
            "give as many ranks to each machine"
        )
    if config.node_rank and config.node_rank >= nodes:
        raise ConfigError(f"node_rank is {config.node_rank}: with nnodes {nodes} it must be less")
