"""Settings of several devices that matter while an engine runs; `CompileConfig` has how a model is divided."""

from __future__ import annotations

from dataclasses import dataclass

from graphllm.config.setting import setting

_PLACED = "every engine core runs the same programs"


@dataclass(frozen=True)
class ParallelConfig:
    """How many engines there are of a model."""

    data_parallel_size: int = setting(
        1,
        help="Engine cores, each with the whole model on devices of its own (on a CPU: with its share of the cores); a "
        "request runs on one of them.",
        key=_PLACED,
        ge=1,
        le=64,
    )
