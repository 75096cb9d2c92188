"""What a benchmark asks for: random prompts of given lengths, or the lines of a file, and when each is sent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graphllm.cli.bench.loads import Endpoint
from graphllm.config import ConfigError

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Span(NamedTuple):
    """Lengths from low to high, each as likely as the others."""

    low: int
    high: int

    @staticmethod
    def parse(name: str, text: str) -> Span:
        """Of "128" or "100-1024". Raises ConfigError."""
        low, dash, high = text.partition("-")
        try:
            span = Span(int(low), int(high if dash else low))
        except ValueError:
            span = Span(0, 0)
        if not 1 <= span.low <= span.high:
            raise ConfigError(f"{name} is {text!r:.80}: give a number of tokens from 1, or a range such as 100-1024")
        return span

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """Lengths of ``count`` requests."""
        lengths: list[int] = random.integers(self.low, self.high + 1, count).tolist()
        return lengths


class Prompt(NamedTuple):
    """Token ids, and how many are to be generated."""

    token_ids: list[int]
    output_len: int


def random_prompts(
    count: int, input_len: Span, output_len: Span, vocab_size: int, seed: int, prefix_len: int = 0
) -> list[Prompt]:
    """Prompts without anything in common but their first ``prefix_len`` tokens, which come before input_len."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, vocab_size, prefix_len).tolist()
    inputs, outputs = input_len.draw(random, count), output_len.draw(random, count)
    return [
        Prompt(shared + random.integers(0, vocab_size, length).tolist(), limit)
        for length, limit in zip(inputs, outputs, strict=True)
    ]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is sent, the first at 0.

    rate: requests per second; infinity sends all at once. burstiness: the shape of the gamma distribution of the gaps:
    1 is a Poisson process, less is burstier, more is steadier.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times: npt.NDArray[np.float64] = np.cumsum(gaps) - gaps[:1]
    found: list[float] = times.tolist()
    return found


def random_bodies(prompts: list[Prompt], fixed: dict[str, Any]) -> list[bytes]:
    """Bodies of completions that generate exactly as many tokens as is asked for."""
    return [
        json.dumps({"prompt": p.token_ids, "max_tokens": p.output_len, "ignore_eos": True, **fixed}).encode()
        for p in prompts
    ]


def dataset_bodies(
    file: Path, count: int | None, endpoint: Endpoint, output_len: int, ignore_eos: bool, fixed: dict[str, Any]
) -> list[bytes]:
    """Bodies from the lines of a file, begun again from the first where there are too few.

    A line is a JSON object with ``prompt`` or ``messages`` and any other fields of the body; ``fixed`` wins over them.
    count: None is one for each line. Raises ConfigError naming file and line.
    """
    lines = list(_lines(file, endpoint))
    own = {"max_tokens": output_len} | ({"ignore_eos": True} if ignore_eos else {})
    chosen = islice(cycle(lines), len(lines) if count is None else count)
    return [json.dumps({**own, **line, **fixed}).encode() for line in chosen]


def _lines(file: Path, endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise ConfigError(f"dataset is {str(file)!r:.80}: it cannot be read ({reason})") from reason
    found = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            found = True
            yield _line(line, f"dataset: {file}:{number}", endpoint)
    if not found:
        raise ConfigError(f"dataset is {str(file)!r:.80}: it has no line; give one JSON object a line")


def _line(text: str, where: str, endpoint: Endpoint) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as damage:
        raise ConfigError(f"{where} is no JSON ({damage}); give an object with prompt or messages") from damage
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise ConfigError(f"{where} is {text!r:.80}: give an object with prompt or messages")
    if endpoint == "completions" and "messages" in line:
        raise ConfigError(f"{where} has messages: give --endpoint chat with them")
    if endpoint == "chat" and "prompt" in line:
        line = {"messages": [{"role": "user", "content": line.pop("prompt")}], **line}
    return line
