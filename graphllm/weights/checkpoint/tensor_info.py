"""Where a tensor of a checkpoint is, and what is said of checkpoints that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphllm.config import ConfigError


class WeightError(ConfigError):
    """A checkpoint that cannot be used, or does not fit the plan. problems: all of them, one line each."""

    def __init__(self, where: Path, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{where}: " + problems[0] if len(problems) == 1 else "\n  ".join([f"{where}:", *problems]))


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is: ``nbytes`` bytes from ``offset`` (absolute) of ``file``. dtype: the safetensors tag."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
