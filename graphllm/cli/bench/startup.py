"""`graphllm bench startup`: seconds from the start of a server process until it lives, is ready and streams a token."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import track

from graphllm.cli.bench import report
from graphllm.cli.bench.client import HttpClient, Timeline
from graphllm.cli.bench.server import ServerError, ServerProcess
from graphllm.cli.build import console
from graphllm.config import ConfigError

_PROMPT = list(range(1, 17))
_STOP_SECONDS = 30.0


class StartTimes(NamedTuple):
    """One start, in seconds from the start of the process: until /health/live and /health/ready were fine, and the
    first token of a completion came. phases: the server's own account. stop: from SIGTERM to the end."""

    live: float
    ready: float
    first_token: float
    phases: dict[str, float]
    stop: float


def bench_startup(
    model: str, options: Sequence[str], runs: int, timeout: float, output: Path | None, quiet: bool
) -> None:
    """Start the server runs + 1 times, the first untimed because it may compile. options: further ones of
    `graphllm serve`. Raises ConfigError when it does not start or does not stop."""
    report.check_output(output)
    if math.isnan(timeout):
        raise ConfigError(f"timeout is {timeout}: give seconds from 1")
    arguments = [model, *([] if "--optimize" in options else ["--optimize", "first"]), *options]
    starts = []
    for number in track(range(runs + 1), "starts", console=console, transient=True, disable=quiet):
        try:
            start = start_once(ServerProcess(arguments), timeout)
        except ServerError as failure:
            raise ConfigError(f"startup: {failure}") from failure
        if number:
            starts.append(start)
    figures = summarize(starts)
    result = {**report.about(), "model": model, "serve_options": list(options), "runs": runs, **figures}
    rows = {name.replace("_", " "): row for name, row in figures["seconds"].items()}
    rows |= {f"by its own clock: {phase}": row for phase, row in figures["phases"].items()}
    grid = [(name, row["median"], row["min"], row["max"]) for name, row in rows.items()]
    report.show_grid(f"{result['model']}, {runs} starts", ("seconds from process start", "median", "min", "max"), grid)
    report.write(output, result)


def start_once(server: ServerProcess, timeout: float) -> StartTimes:
    """Wait for it, use it, stop it. Raises ServerError."""
    with server:
        live = server.wait_for("/health/live", timeout)
        ready = server.wait_for("/health/ready", timeout)
        timeline = uvloop.run(_first_token(server.url, timeout))
        if timeline.error is not None:
            raise server.failed(f"the first completion failed: {timeline.error}")
        phases = read_phases(server.get("/metrics"))
        first_token = timeline.started + timeline.ttft - server.started
        return StartTimes(live, ready, first_token, phases, server.stop(_STOP_SECONDS))


async def _first_token(url: str, timeout: float) -> Timeline:
    body = {
        "prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with contextlib.closing(HttpClient(url, timeout=timeout)) as client:
        return await client.stream("/v1/completions", json.dumps(body).encode())


def read_phases(metrics: str) -> dict[str, float]:
    """The server's start-up phases in seconds, from the text of /metrics; empty when it has none."""
    return {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "graphllm_startup_seconds"
    }


def summarize(starts: Sequence[StartTimes]) -> dict[str, Any]:
    """Median, least and most of each and of the phases, and all runs."""
    seconds = {
        name: _spread([getattr(start, name) for start in starts]) for name in StartTimes._fields if name != "phases"
    }
    names = dict.fromkeys(phase for start in starts for phase in start.phases)
    phases = {phase: _spread([s.phases[phase] for s in starts if phase in s.phases]) for phase in names}
    return {"seconds": seconds, "phases": phases, "starts": [start._asdict() for start in starts]}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
