"""Every setting of graphllm as one tree of frozen dataclasses; no module-level state.

A field that must not change the artifact key carries ``metadata=not_key("reason")``; every other field is part of it.
The environment is read in one place, `Env.read`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Quantization = Literal["int8", "int4"]


def not_key(reason: str) -> dict[str, str]:
    """Field metadata: leave the field out of the artifact key, because of ``reason``."""
    return {"not_key": reason}


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the field, the value and the remedy."""


@dataclass(frozen=True)
class Target:
    """The machine an artifact is compiled for.

    device: "cpu" or "cuda". arch: "sm_90" on CUDA, the sorted instruction-set flags the kernels may use on a CPU.
    name: the product name, for people. cores: what the kernels' parallel regions were planned for.
    """

    device: Literal["cpu", "cuda"]
    arch: tuple[str, ...]
    name: str = field(default="", metadata=not_key("a label; `arch` says what matters"))


@dataclass(frozen=True, order=True)
class Bucket:
    """A range of token counts that one specialization of the graph serves.

    kind "decode": every scheduled sequence has exactly one token, so T == S. kind "mixed": one ragged batch of prefill
    and decode. A bucket with ``lo == hi`` is compiled for that static T; T and S are dynamic (and at least 2)
    otherwise.
    """

    kind: Literal["decode", "mixed"]
    lo: int
    hi: int

    @property
    def static(self) -> bool:
        return self.lo == self.hi

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.lo}" if self.static else f"{self.kind}-{self.lo}-{self.hi}"

    def limits(self, max_num_seqs: int) -> dict[str, int]:
        """The largest T and S of a step in this bucket. A dynamic S is at least 2, however few sequences there are."""
        if self.kind == "decode" or self.hi == 1:
            return {"T": self.hi, "S": self.hi}
        return {"T": self.hi, "S": max(2, max_num_seqs)}


@dataclass(frozen=True)
class ParallelConfig:
    """Over how many ranks a model is spread; which rank a process is, is no part of an artifact.

    tensor_parallel_size: ranks that divide the layers' matrices among them.
    """

    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class CompileConfig:
    """All that `graphllm compile` needs beside the model's own config; every field is in the artifact key by
    default."""

    target: Target
    backend: Literal["inductor", "eager"] = "inductor"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    buckets: tuple[Bucket, ...] = ()
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    tune: bool = False
    quantize: Quantization | None = None
    parallel: ParallelConfig = ParallelConfig()
    dump: Path | None = field(
        default=None, metadata=not_key("where to write the readable IR; the artifact is the same")
    )
    jobs: int = field(default=0, metadata=not_key("parallel build processes; the artifact is the same"))


@dataclass(frozen=True)
class Env:
    """The environment variables graphllm knows, read once by the command line and passed down as this value."""

    cache_dir: Path

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Env:
        """GRAPHLLM_CACHE, else XDG_CACHE_HOME/graphllm, else ~/.cache/graphllm."""
        explicit = environ.get("GRAPHLLM_CACHE")
        base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Env(cache_dir=Path(explicit) if explicit else Path(base) / "graphllm")


def key_fields(config: object) -> dict[str, object]:
    """The part of a config dataclass that enters the artifact key: every field but those marked `not_key`,
    recursively."""
    out: dict[str, object] = {}
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        if "not_key" in f.metadata:
            continue
        out[f.name] = _plain(getattr(config, f.name))
    return out


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return key_fields(value)
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value
