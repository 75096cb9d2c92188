"""Settings of several devices that matter while an engine runs; `CompileConfig` has how a model is divided."""

from __future__ import annotations

from dataclasses import dataclass

from graphllm.config.setting import setting

_PLACED = "every engine core runs the same programs"


@dataclass(frozen=True)
class ParallelConfig:
    """How many engines there are of a model, and in how many stages each computes."""

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
        help="Of the one engine core that this process has of the data_parallel_size on this machine, behind somebody "
        "else's load balancer; None: it has all of them.",
        key=_PLACED,
        ge=0,
    )

    pipeline_parallel_size: int = setting(
        1,
        help="Stages of consecutive layers, each with its ranks; steps go through them one after the other.",
        key="every rank has the same programs, and makes the calls of its stage",
        ge=1,
        le=2**10,
    )

    @property
    def cores(self) -> int:
        """Of this process."""
        return self.data_parallel_size if self.data_parallel_rank is None else 1
