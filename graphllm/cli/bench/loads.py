"""What the commands of `graphllm bench` measure, as their command lines say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphllm.config import ConfigError

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True)
class Traffic:
    """What to send where. model: None for the server's own. num_prompts: None for the dataset's lines, or 1000.
    request_rate: per second, infinity for all at once. max_concurrency: requests in flight, None for no limit.
    input_len, output_len: "128" or "100-1024". timeout: seconds for one request."""

    url: str
    api_key: str | None = None
    model: str | None = None
    endpoint: Endpoint = "completions"
    dataset: Path | None = None
    num_prompts: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: str = "512"
    output_len: str = "128"
    prefix_len: int = 0
    vocab_size: int = 1000
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    goodput: Sequence[str] = ()
    num_warmups: int = 1
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"request-rate is {self.request_rate}: give requests per second, or inf for all at once")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"burstiness is {self.burstiness}: give a number above 0; 1 is a Poisson process")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"request-timeout is {self.timeout}: give seconds above 0")


@dataclass(frozen=True)
class Throughput:
    """All requests at once. input_len, output_len: "128" or "100-1024". n: completions of each prompt."""

    num_prompts: int = 1000
    input_len: str = "512"
    output_len: str = "128"
    prefix_len: int = 0
    n: int = 1
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Latency:
    """One batch after the other, of requests that begin and end together."""

    batch_size: int = 8
    input_len: int = 32
    output_len: int = 128
    num_iters: int = 30
    num_iters_warmup: int = 10
    seed: int = 0
