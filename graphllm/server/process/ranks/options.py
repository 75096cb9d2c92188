"""`RankOptions`: which servers a supervisor of data parallel ranks starts, and how it looks at them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphllm.config import ConfigError


@dataclass(frozen=True)
class RankOptions:
    """ranks: how many. gpus: of each. host, port: where the first one listens, the others on the ports behind it.
    supervisor_port: where their health is told, at the same address. tls: they speak HTTPS. restart: bring back one
    that ends. shutdown_timeout: seconds that their requests may take at the end. probe_interval, probe_timeout:
    seconds. probe_failure_threshold: failures in a row after which a rank counts as unhealthy."""

    ranks: int
    gpus: int
    host: str
    port: int
    supervisor_port: int = 9256
    tls: bool = False
    restart: bool = False
    shutdown_timeout: float = 30.0
    probe_interval: float = 5.0
    probe_timeout: float = 5.0
    probe_failure_threshold: int = 3

    def check(self) -> None:
        """Raise ConfigError for what cannot be."""
        for name in ("probe_interval", "probe_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                raise ConfigError(f"dp-supervisor-{name.replace('_', '-')}-s is {seconds}: give seconds above 0")
        if self.probe_failure_threshold < 1:
            raise ConfigError(
                f"dp-supervisor-probe-failure-threshold is {self.probe_failure_threshold}: give a number above 0"
            )
        last = self.port + self.ranks - 1
        if not 1 <= self.port <= last < 1 << 16:
            raise ConfigError(
                f"port is {self.port}: the {self.ranks} ranks listen there and behind it; give the first of so many"
            )
        if self.port <= self.supervisor_port <= last:
            raise ConfigError(
                f"data-parallel-supervisor-port is {self.supervisor_port}: rank {self.supervisor_port - self.port} "
                "listens there; give another one"
            )

    def words(self, command: Sequence[str], rank: int) -> list[str]:
        """The command line of a rank, from that of all; of an option that comes twice, the last one counts."""
        at = command.index("--") if "--" in command else len(command)
        own = ["--port", str(self.port + rank), "--data-parallel-rank", str(rank)]
        return [*command[:at], *own, *command[at:]]
