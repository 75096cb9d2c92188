"""`RankOptions`: which servers a supervisor of data parallel ranks starts, and how it looks at them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphllm.config import ConfigError
from graphllm.config.server import ServerConfig


@dataclass(frozen=True)
class RankOptions:
    """config: the settings of every server; port is the first rank's, the others listen on the ports after it.
    ranks: number of servers.
    gpus: number of GPUs of each.
    """

    config: ServerConfig
    ranks: int
    gpus: int

    def check(self) -> None:
        """Raise ConfigError for what cannot be."""
        ranks, listen = self.config.ranks, self.config.listen
        for name in ("dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s"):
            seconds = getattr(ranks, name)
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{name.replace('_', '-')} is {seconds}: give seconds above 0")
        if (threshold := ranks.dp_supervisor_probe_failure_threshold) < 1:
            raise ConfigError(f"dp-supervisor-probe-failure-threshold is {threshold}: give a number above 0")
        if listen.uds is not None:
            raise ConfigError(f"uds is {str(listen.uds)!r}: each rank has a port of its own; leave it out")
        first, supervisor = listen.port, ranks.data_parallel_supervisor_port
        last = first + self.ranks - 1
        if not 1 <= first <= last < 1 << 16:
            raise ConfigError(
                f"port is {first}: the {self.ranks} ranks listen there and on the ports after it; give the first of "
                f"{self.ranks} ports"
            )
        if first <= supervisor <= last:
            raise ConfigError(
                f"data-parallel-supervisor-port is {supervisor}: rank {supervisor - first} listens there; give another "
                "one"
            )

    def words(self, command: Sequence[str], rank: int) -> list[str]:
        """The command line of a rank, from that of all; of an option that comes twice, the last one counts."""
        at = command.index("--") if "--" in command else len(command)
        own = ["--port", str(self.config.listen.port + rank), "--data-parallel-rank", str(rank)]
        return [*command[:at], *own, *command[at:]]
