"""From the timelines of a load test to its figures, with vLLM's names and meanings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphllm.cli.bench.client import Timeline
from graphllm.config import ConfigError

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after it",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
_GOODPUT = ("ttft", "tpot", "e2el")


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric, of ``["ttft:200 tpot:50"]`` or ``["ttft:200", "tpot:50"]``. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in " ".join(given).replace(",", " ").split():
        name, _, limit = part.partition(":")
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = 0.0
        if name not in _GOODPUT or not milliseconds > 0:
            raise ConfigError(f"goodput has {part!r:.80}: give {', '.join(_GOODPUT)} in ms, such as ttft:200")
        found[name] = milliseconds
    return found


def summarize(timelines: Sequence[Timeline], duration: float, goodput: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run of ``duration`` seconds; None where nothing was measured.

    Requests that failed count only as failed. Inter-token latency is the time between pieces of a stream. A
    piece may have several tokens; tokens_per_chunk is their mean number.
    """
    done = [t for t in timelines if t.error is None]
    output_tokens, input_tokens = sum(t.output_tokens for t in done), sum(t.prompt_tokens for t in done)
    pieces = sum(len(t.pieces) for t in done)
    values: dict[str, list[float]] = {
        "ttft": [t.ttft for t in done],
        "tpot": [t.tpot for t in done if t.tpot is not None],
        "itl": [gap for t in done for gap in t.itl],
        "e2el": [t.e2el for t in done],
    }
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "failures": dict(Counter(t.error for t in timelines if t.error is not None).most_common(20)),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(_good(t, goodput) for t in done) / duration if goodput else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "tokens_per_chunk": output_tokens / pieces if pieces else None,
    }
    for name, seconds in values.items():
        found |= _spread(name, seconds)
    return found


def _good(timeline: Timeline, goodput: Mapping[str, float]) -> bool:
    return all((getattr(timeline, name) or 0.0) * 1e3 <= limit for name, limit in goodput.items())


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in milliseconds."""
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))]
    if not seconds:
        return dict.fromkeys(keys)
    ms = 1e3 * np.asarray(seconds)
    figures = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, PERCENTILES)]
    return {key: float(figure) for key, figure in zip(keys, figures, strict=True)}
