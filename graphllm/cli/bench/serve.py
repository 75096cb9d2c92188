"""`graphllm bench serve`: sends requests to a running server at a rate, and measures what its users would see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.progress import Progress, TextColumn

from graphllm.cli.bench import report
from graphllm.cli.bench.client import HttpClient, Timeline
from graphllm.cli.bench.loads import Traffic
from graphllm.cli.bench.metrics import LATENCIES, PERCENTILES, parse_goodput, summarize
from graphllm.cli.bench.workload import PATHS, Span, arrivals, dataset_bodies, random_bodies, random_prompts
from graphllm.cli.build import console
from graphllm.config import ConfigError

_DEFAULT_PROMPTS = 1000
_BUSY = 0.9  # share of a core above which this client may be what is measured


class Server(NamedTuple):
    """What a server says about itself. max_model_len: None where it does not say."""

    model: str
    max_model_len: int | None
    version: str | None


class Sent(NamedTuple):
    """A run: its requests in their order, seconds from the first to the end, the most that were in flight at once, and
    the share of one core that this client took."""

    timelines: list[Timeline]
    duration: float
    peak: int
    cpu: float


@dataclass
class Counts:
    """How far a run is."""

    running: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    peak: int = 0


def bench_serve(load: Traffic, output: Path | None, quiet: bool) -> int:
    """Measure, show and write; the exit status: 1 when requests failed. Raises ConfigError before anything is measured
    when the server cannot be used."""
    report.check_output(output)
    goodput = parse_goodput(load.goodput)
    _raise_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server, sent = runner.run(_measure(load, quiet))
    figures = summarize(sent.timelines, sent.duration, goodput)
    result = {
        **report.about(),
        "server": {"url": load.url, **server._asdict()},
        "endpoint": load.endpoint,
        "dataset": "random" if load.dataset is None else str(load.dataset),
        "input_len": load.input_len if load.dataset is None else None,
        "output_len": load.output_len,
        "prefix_len": load.prefix_len,
        "temperature": load.temperature,
        "seed": load.seed,
        "num_prompts": len(sent.timelines),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "max_concurrent_requests": sent.peak,
        "client_cpu_share": sent.cpu,
        **figures,
    }
    _show(result)
    report.write(output, result)
    return 1 if figures["failed"] else 0


async def _measure(load: Traffic, quiet: bool) -> tuple[Server, Sent]:
    client = HttpClient(load.url, load.api_key, load.timeout)
    with contextlib.closing(client):
        server = await ask(client, load.url, load.model)
        warm_ups, bodies = prepare(load, server)
        path = PATHS[load.endpoint]
        for body in warm_ups:
            if (problem := (await client.stream(path, body)).error) is not None:
                raise ConfigError(f"url: {load.url} cannot be measured, the warm-up request failed: {problem:.200}")
        times = arrivals(len(bodies), load.request_rate, load.burstiness, load.seed)
        counts = Counts()
        with _progress(len(bodies), quiet) as show:
            watcher = asyncio.create_task(_watch(counts, show))
            try:
                return server, await send(client, path, bodies, times, load.max_concurrency, counts)
            finally:
                watcher.cancel()


async def ask(client: HttpClient, url: str, model: str | None) -> Server:
    """What is served there. Raises ConfigError when there is no server, or none of that model."""
    try:
        reply = await client.fetch("/v1/models")
        version = await client.fetch("/version")
    except OSError as reason:
        raise ConfigError(f"url: no server answers at {url} ({reason}); start one with `graphllm serve`") from reason
    if reply.status != 200:
        raise ConfigError(f"url: {url}/v1/models says {reply.describe()}")
    try:
        cards = {card["id"]: card for card in json.loads(reply.body)["data"]}
        name = next(iter(cards)) if model is None else model
    except (ValueError, KeyError, TypeError, StopIteration) as reason:
        raise ConfigError(f"url: {url}/v1/models does not list a model; give the URL of an OpenAI API") from reason
    if name not in cards:
        raise ConfigError(f"model is {name!r:.80}: not served there; give one of {', '.join(cards)}")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return Server(name, cards[name].get("max_model_len"), str(json.loads(version.body)["version"]))
    return Server(name, cards[name].get("max_model_len"), None)


def prepare(load: Traffic, server: Server) -> tuple[list[bytes], list[bytes]]:
    """Bodies for warming up, and those that are measured. Raises ConfigError for what cannot run."""
    output_len = Span.parse("output-len", load.output_len)
    fixed = {
        "model": server.model,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.dataset is not None:
        if output_len.low != output_len.high:
            raise ConfigError(f"output-len is {load.output_len!r:.80}: a range has no meaning with --dataset")
        bodies = dataset_bodies(
            load.dataset, load.num_prompts, load.endpoint, output_len.high, load.ignore_eos, fixed
        )  # fmt: skip
        return bodies[:1] * load.num_warmups, bodies
    if load.endpoint == "chat":
        raise ConfigError("endpoint is chat: random prompts are token ids, for completions; give --dataset with it")
    input_len, count = Span.parse("input-len", load.input_len), load.num_prompts or _DEFAULT_PROMPTS
    longest = load.prefix_len + input_len.high + output_len.high
    if server.max_model_len is not None and longest > server.max_model_len:
        raise ConfigError(
            f"input-len is {load.input_len!r:.80}: prompts and outputs of up to {longest} tokens do not fit into the "
            f"model's {server.max_model_len}; lower --input-len or --output-len"
        )
    count += load.num_warmups
    prompts = random_prompts(count, input_len, output_len, load.vocab_size, load.seed, load.prefix_len)
    bodies = random_bodies(prompts, fixed)
    return bodies[: load.num_warmups], bodies[load.num_warmups :]


async def send(
    client: HttpClient,
    path: str,
    bodies: Sequence[bytes],
    times: Sequence[float],
    max_concurrency: int | None,
    counts: Counts,
) -> Sent:
    """Send each body at its time, and wait for all. A request over max_concurrency waits, and its clock starts after
    that."""
    limit = asyncio.Semaphore(max_concurrency or len(bodies))

    async def one(body: bytes) -> Timeline:
        async with limit:
            counts.running += 1
            counts.peak = max(counts.peak, counts.running)
            timeline = await client.stream(path, body)
            counts.running -= 1
            counts.done += 1
            counts.failed += timeline.error is not None
            counts.tokens += timeline.output_tokens
            return timeline

    begun, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, at in zip(bodies, times, strict=True):
            wait = begun + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(body)))
    duration = time.perf_counter() - begun
    return Sent([task.result() for task in tasks], duration, counts.peak, (time.process_time() - cpu) / duration)


async def _watch(counts: Counts, show: Any) -> None:
    while True:
        show(counts)
        await asyncio.sleep(0.2)


@contextlib.contextmanager
def _progress(total: int, hidden: bool) -> Iterator[Any]:
    """show(counts): a bar of the requests that are done."""
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False) as view:
        task = view.add_task("requests", total=total, state="")

        def show(counts: Counts) -> None:
            failed = f", {counts.failed} failed" if counts.failed else ""
            state = f"{counts.running} running{failed}, {counts.tokens:,} tokens"
            view.update(task, completed=counts.done, state=state, refresh=True)

        yield show


def _raise_open_files() -> None:
    """Each request in flight has a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _show(result: dict[str, Any]) -> None:
    rows = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Request rate configured (req/s)", result["request_rate"]),
        ("Maximum request concurrency", result["max_concurrency"]),
        ("Peak concurrent requests", result["max_concurrent_requests"]),
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
        ("Request goodput (req/s)", result["request_goodput"]),
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
        ("Tokens per streamed chunk", result["tokens_per_chunk"]),
        ("CPU of this client (cores)", result["client_cpu_share"]),
    ]
    report.show(f"{result['server']['model']} at {result['server']['url']}", rows)
    kinds = ("mean", *(f"p{p}" for p in PERCENTILES))
    grid = [
        (f"{meaning} ({name.upper()})", *(result[f"{kind}_{name}_ms"] for kind in kinds))
        for name, meaning in LATENCIES.items()
    ]
    report.show_grid("", ("ms", *kinds), grid)
    for reason, count in result["failures"].items():
        console.print(f"{count} failed: {reason}", style="red", markup=False, highlight=False)
    if result["client_cpu_share"] > _BUSY:
        console.print("this client was busy all the time: it may be what was measured", style="yellow")
